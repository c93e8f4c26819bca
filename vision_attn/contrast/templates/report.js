// A click on a column's title sorts the table by it; a second click turns the order around.
document.querySelectorAll('table.data').forEach(function (table) {
  var body = table.tBodies[0];
  table.querySelectorAll('thead th').forEach(function (head, column) {
    var button = document.createElement('button');
    button.type = 'button';
    button.textContent = head.textContent;
    head.replaceChildren(button);
    button.addEventListener('click', function () {
      var down = head.getAttribute('aria-sort') === 'ascending';
      table.querySelectorAll('thead th').forEach(function (other) { other.removeAttribute('aria-sort'); });
      head.setAttribute('aria-sort', down ? 'descending' : 'ascending');
      var key = function (row) {
        var cell = row.cells[column];
        return cell.dataset.sort === undefined ? cell.textContent.trim() : Number(cell.dataset.sort);
      };
      var rows = Array.from(body.rows).sort(function (a, b) {
        var x = key(a), y = key(b);
        if (typeof x !== typeof y) return typeof x === 'number' ? -1 : 1;  // without a number: always last
        var order = typeof x === 'number' ? x - y : x.localeCompare(y);
        return down ? -order : order;
      });
      rows.forEach(function (row) { body.appendChild(row); });
    });
  });
});
// Paper cannot be unfolded.
window.addEventListener('beforeprint', function () {
  document.querySelectorAll('details').forEach(function (fold) { fold.open = true; });
});
