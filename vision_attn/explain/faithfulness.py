"""What a map is worth: deletion and insertion (Petsiuk et al. 2018, arXiv 1806.07421) against maps that know nothing.

Take away first what a map calls important, and the answer should fall soon; bring it back first, and the answer should
return soon. A map is only as good as its lead over maps that know nothing; gradient × input is the simple rival.

Two kinds of map know nothing. A random map draws every cell for itself. A moved map is the map in question, turned,
mirrored and shifted at random with wraparound (a toroidal shift, Lotwick and Silverman 1982, J. R. Statist. Soc. B 44,
406–413): it has the map's own values and its smoothness, and no longer knows where it lay. Attention maps are smooth,
and a smooth map hits a compact object whole or not at all, which maps of white noise never do: beating those alone is
a matter of luck. Moved maps need no second image, as taking the map of another image would.

A moved map is one that the original could have been, if its place told nothing, so each image's maps may change places
among themselves: that is a randomization test, exact with the original among the draws (Hemerik and Goeman 2018, TEST
27, 811–825). "Better than random" wants both kinds beaten. It speaks of the place of a map: a blob in the middle of
photographs whose objects stand in the middle does know something.

Legend: B images, S steps, K maps of a kind that know nothing for each image.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vision_attn.errors import UserError
from vision_attn.explain.planes import evaluating

CAUSES = "Attention weights say where information may come from; they are not causes of the answer."
RIVAL = "gradient × input"
RANDOM, MOVED = "random maps", "the map itself, moved"
LEVEL = 0.05
LEAST = 4  # maps of a kind that know nothing for each image of a set
DRAWS = 4096  # of which map each image has, where there are too many ways to go through


@dataclasses.dataclass(frozen=True)
class Curve:
    """One map's curves over a set of images.

    Attributes:
        deletion, insertion: (…, B, S + 1) probability of the class, with 0, 1/S … all of the image taken away or
            brought back.
    """

    deletion: Tensor
    insertion: Tensor

    @property
    def score(self) -> Tensor:
        """(…, B) area under insertion less area under deletion: −1 to 1, higher is better, about 0 for no knowledge."""
        return _area(self.insertion) - _area(self.deletion)


@dataclasses.dataclass(frozen=True)
class Faithfulness:
    """Curves of maps, of gradient × input and of maps that know nothing.

    Attributes:
        shares: (S + 1,) shares of the image.
        curves: name → curves; ``gradient × input`` among them.
        drawn: (K, B, S + 1) curves of random maps.
        moved: name → (K, B) scores of the same map in other places.
    """

    shares: Tensor
    curves: dict[str, Curve]
    drawn: Curve
    moved: dict[str, Tensor]

    @property
    def random(self) -> Curve:
        """(B, S + 1) the mean curves of random maps."""
        return Curve(self.drawn.deletion.mean(0), self.drawn.insertion.mean(0))

    @property
    def trials(self) -> Tensor:
        """(K, B) scores of random maps."""
        return self.drawn.score

    def lead(self, name: str, over: str = RANDOM) -> tuple[float, float, float]:
        """How much higher a map scores than another, mean over images, and the 95 % interval (Student's t over images).

        For a single image the interval is that of the scores of maps that know nothing; against another map there is
        none, and NaN stands for it.

        Args:
            name: of the map.
            over: ``RANDOM``, ``MOVED``, or the name of another map, such as ``RIVAL``.
        """
        own = self.curves[name].score.double()
        if over in (RANDOM, MOVED):
            others = (self.trials if over == RANDOM else self.moved[name]).double()
        else:
            others = self.curves[over].score.double()[None]
        ahead = own - others.mean(0)
        if len(ahead) > 1:
            mean, half = (float(x) for x in mean_and_half(ahead))
            return mean, mean - half, mean + half
        if len(others) == 1:
            return float(ahead), math.nan, math.nan
        low, high = torch.quantile((own - others)[:, 0], torch.tensor([0.025, 0.975]).double()).tolist()
        return float(ahead), low, high

    def chance(self, name: str) -> float:
        """How often maps that know nothing do at least as well on these images; the larger of the two kinds' shares."""
        own = self.curves[name].score
        return max(_chance(own, others) for others in (self.trials, self.moved[name]))

    def beats_random(self, name: str) -> bool:
        """Whether maps that know nothing do as well once in twenty times at most, and, from five images on, leads hold.

        With fewer images than five an interval over images says nothing, so that the answer is about those alone.
        """
        sure = len(self.random.deletion) < 5 or all(self.lead(name, over)[1] > 0 for over in (RANDOM, MOVED))
        return self.chance(name) <= LEVEL + 1e-9 and sure

    @property
    def too_few(self) -> bool:
        """Whether even a map that beats all that know nothing might do so by chance."""
        k, images = self.trials.shape
        return float(k + 1) ** -images > LEVEL + 1e-9

    def verdict(self, name: str) -> str:
        """A few words for the title of a figure."""
        if self.beats_random(name):
            return f"better than random ({self.lead(name)[0]:+.2f}) on {self._where}"
        if self.too_few:
            return f"{len(self.trials)} random maps are too few to tell on {self._where}"
        return f"NO BETTER THAN RANDOM on {self._where}"

    @property
    def _where(self) -> str:
        count = len(self.random.deletion)
        return f"these {count} images" if count > 1 else "this image"


def mean_and_half(values: Tensor) -> tuple[Tensor, Tensor]:
    """(B, …) → the mean over images and half its 95 % interval (Student's t); NaN for a single image."""
    from scipy.stats import t

    b = len(values)
    if b < 2:
        return values.mean(0), torch.full_like(values[0], math.nan)
    return values.mean(0), float(t.ppf(0.975, b - 1)) / math.sqrt(b) * values.std(0)


def maps_for_each(trials: int, images: int) -> int:
    """K: all of the trials for a single image, fewer for each of a set, whose images speak together."""
    return min(trials, max(LEAST, -(-trials // images)))


def passes(maps: int, k: int, steps: int) -> int:
    """How many times ``faithfulness`` asks the model about each image, for so many maps; K as above."""
    middle = 2 * (steps - 1)
    return 4 + middle * (k + (maps + 1) * (1 + k))  # random maps; each map and its rival, in place and moved


def _chance(own: Tensor, others: Tensor) -> float:
    """How often the mean over images is as high when every image has any of its K + 1 maps: (B,) and (K, B)."""
    scores = torch.cat([own[None], others]).double()  # (K + 1, B)
    count, images = scores.shape
    if float(count) ** images <= DRAWS:
        which = torch.tensor(list(itertools.product(range(count), repeat=images)))
    else:
        which = torch.randint(count, (DRAWS, images), generator=torch.Generator().manual_seed(0))
        which[0] = 0  # the original is one of the draws
    means = scores.gather(0, which).mean(1)
    return float((means >= own.double().mean() - 1e-9).double().mean())


@torch.no_grad()
def faithfulness(
    model: nn.Module,
    images: Tensor,
    maps: Mapping[str, Tensor],
    *,
    classes: Tensor | None = None,
    answer: Callable[[Tensor], Tensor] | None = None,
    cells: tuple[int, int] | None = None,
    steps: int = 8,
    trials: int = 19,
    batch_size: int = 64,
    seed: int = 0,
) -> Faithfulness:
    """Deletion and insertion curves of maps, against random maps, themselves in other places, and gradient × input.

    All maps are judged on the same cells and with the same number of steps. Deleted cells become the mean of the
    training set (0 after normalization); insertion begins with a blurred image, as in the paper. Cells that a map finds
    equally important come in random order.

    Args:
        model: left as it is.
        images: (B, C, H, W), normalized.
        maps: name → (B, R, C) or (B, H, W), higher is more important.
        classes: (B,) the class of each image; by default the likeliest.
        answer: images (B', C, H, W) → (B',) what is watched, for models that are no classifiers. Image ``i`` of a set
            of B is at ``i``, ``i + B`` … of those given. ``classes`` is not used then.
        cells: (rows, columns) the image is cut into; by default those of the first map, at most 16 × 16.
        steps: S.
        trials: maps that know nothing, of each kind, for a single image. With 19, a map that beats them all does so
            by chance once in twenty times. Of a set every image gets ``trials / B``, and no fewer than four.
        batch_size: images per forward pass, and in memory; larger sets are measured in parts (with ``answer``, each
            forward pass has at least B).
        seed: of the maps that know nothing.

    Raises:
        UserError: maps that do not belong to the images.
    """
    if trials < 1 or steps < 1:
        raise UserError(f"trials={trials} and steps={steps} must be 1 or more")
    where = next(model.parameters())
    x = images.to(where.device, where.dtype)
    cells = _cells(maps, x, cells)
    generator = torch.Generator().manual_seed(seed)
    given = {name: _on_cells(m.to(x.device), cells) for name, m in maps.items()}
    k = maps_for_each(trials, len(x))
    found = []
    with evaluating(model):
        for rows in torch.arange(len(x)).split(len(x) if answer is not None else batch_size):
            some, watched = x[rows], answer
            if watched is None:
                watched = _probability(model, some, None if classes is None else classes[rows])
            mine = {name: m[rows] for name, m in given.items()}
            mine[RIVAL] = _on_cells(gradient_times_input(model, some, watched), cells)
            ask = _Ask(watched, some, cells, steps, batch_size, generator)
            found.append(_measured(ask, mine, k, generator))
    return joined(found)


def _measured(ask: _Ask, maps: Mapping[str, Tensor], k: int, generator: torch.Generator) -> Faithfulness:
    """All maps of some images, and those that know nothing."""
    curves = {name: ask.curve(m) for name, m in maps.items()}
    drawn = [ask.curve(torch.rand(len(ask.x), *ask.cells, generator=generator).to(ask.x.device)) for _ in range(k)]
    kept = Curve(torch.stack([c.deletion for c in drawn]), torch.stack([c.insertion for c in drawn]))
    moved = {
        name: torch.stack([ask.curve(moved_map(m, generator)).score for _ in range(k)]) for name, m in maps.items()
    }
    return Faithfulness(torch.linspace(0, 1, ask.steps + 1), curves, kept, moved)


def moved_map(m: Tensor, generator: torch.Generator) -> Tensor:
    """Each map of (B, R, C) turned and mirrored (by quarters only where R = C), and shifted with wraparound, at random.

    All of these are equally likely, leaving the map where it is among them.
    """
    rows, columns = m.shape[-2:]
    out = []
    for one in m:
        quarters, mirror, down, across = (
            int(torch.randint(high, (), generator=generator)) for high in (4, 2, rows, columns)
        )
        one = one.rot90(quarters if rows == columns else 2 * (quarters % 2))
        one = one.flip(0) if mirror else one
        out.append(one.roll((down, across), (0, 1)))
    return torch.stack(out)


def joined(parts: Sequence[Faithfulness]) -> Faithfulness:
    """Images that were asked about one by one, as one set; of maps that all of them have."""
    if len(parts) == 1:
        return parts[0]
    names = [name for name in parts[0].curves if all(name in part.curves for part in parts)]
    k = min(len(part.trials) for part in parts)

    def cat(curves: Sequence[Curve]) -> Curve:
        return Curve(torch.cat([c.deletion for c in curves], -2), torch.cat([c.insertion for c in curves], -2))

    together = {name: cat([part.curves[name] for part in parts]) for name in names}
    drawn = cat([Curve(part.drawn.deletion[:k], part.drawn.insertion[:k]) for part in parts])
    moved = {name: torch.cat([part.moved[name][:k] for part in parts], 1) for name in names}
    return Faithfulness(parts[0].shares, together, drawn, moved)


def gradient_times_input(model: nn.Module, images: Tensor, answer: Callable[[Tensor], Tensor]) -> Tensor:
    """(B, H, W): the size of gradient × input of each pixel, summed over channels."""
    x = images.detach().clone().requires_grad_()
    with torch.enable_grad():
        (gradient,) = torch.autograd.grad(answer(x).sum(), x)
    return (gradient * x).detach().abs().sum(1)


def _probability(model: nn.Module, x: Tensor, classes: Tensor | None) -> Callable[[Tensor], Tensor]:
    logits = model(x)
    if not isinstance(logits, Tensor) or logits.dim() != 2:
        raise UserError(f"{type(model).__name__} gives no logits of classes: say what to watch with answer=….")
    chosen = logits.argmax(-1) if classes is None else classes.to(x.device)

    def answer(images: Tensor) -> Tensor:
        out = model(images).float()
        picked = chosen.repeat(-(-len(out) // len(chosen)))[: len(out), None]
        return (out.gather(1, picked)[:, 0] - out.logsumexp(1)).exp()

    return answer


def _cells(maps: Mapping[str, Tensor], x: Tensor, cells: tuple[int, int] | None) -> tuple[int, int]:
    for name, m in maps.items():
        if m.dim() != 3 or len(m) != len(x):
            raise UserError(f"map {name!r} {tuple(m.shape)} is not (B, R, C) of {len(x)} images")
    if cells is None:
        first = next(iter(maps.values())).shape[-2:] if maps else x.shape[-2:]
        cells = min(first[0], 16), min(first[1], 16)
    if cells[0] > x.shape[-2] or cells[1] > x.shape[-1]:
        raise UserError(f"cells={cells}: the images have only {tuple(x.shape[-2:])} pixels")
    return cells


def _on_cells(m: Tensor, cells: tuple[int, int]) -> Tensor:
    """(B, R, C) → (B, *cells), means where cells are larger."""
    return F.adaptive_avg_pool2d(m.float()[:, None], cells)[:, 0]


@dataclasses.dataclass
class _Ask:
    """Asks a model about images that are partly there."""

    answer: Callable[[Tensor], Tensor]
    x: Tensor
    cells: tuple[int, int]
    steps: int
    batch_size: int
    generator: torch.Generator

    def __post_init__(self) -> None:
        self.blurred = _blur(self.x)
        self.ends: Tensor | None = None  # (3, B) answers to nothing, to the blurred and to the whole image

    def curve(self, m: Tensor) -> Curve:
        """(B, rows, columns) → its curves."""
        if self.ends is None:  # they are the same for every map
            self.ends = self._ask([self.x * 0, self.blurred, self.x])
        order = self._ranks(m.flatten(1))
        cells = order.shape[1]
        answers = []
        middle = range(1, self.steps)
        at_once = max(1, self.batch_size // (2 * len(self.x)))
        for some in (middle[i : i + at_once] for i in range(0, len(middle), at_once)):  # few copies at a time
            shown: list[Tensor] = []
            for step in some:
                taken = (order < round(cells * step / self.steps)).view(-1, 1, *self.cells).to(self.x.dtype)
                mask = F.interpolate(taken, size=self.x.shape[-2:], mode="nearest")
                shown += [self.x * (1 - mask), self.x * mask + self.blurred * (1 - mask)]
            answers.append(self._ask(shown))
        between = torch.cat([*answers, self.ends[:0]])  # (2 (S − 1), B)
        nothing, blurred, whole = self.ends.split(1)
        deletion = torch.cat([whole, between[0::2], nothing])
        insertion = torch.cat([blurred, between[1::2], whole])
        return Curve(deletion.T.contiguous(), insertion.T.contiguous())

    def _ranks(self, m: Tensor) -> Tensor:
        """(B, cells) → 0 for the most important; cells that are alike come in random order."""
        shuffled = torch.rand(m.shape, generator=self.generator).argsort(1).to(m.device)
        order = shuffled.gather(1, m.gather(1, shuffled).argsort(dim=1, descending=True, stable=True))
        return order.argsort(1)

    def _ask(self, shown: Sequence[Tensor]) -> Tensor:
        batch, at_once = len(self.x), max(1, self.batch_size // len(self.x))
        parts = (shown[i : i + at_once] for i in range(0, len(shown), at_once))
        return torch.cat([self.answer(torch.cat(list(part))).view(-1, batch) for part in parts]).float().cpu()


def _blur(x: Tensor) -> Tensor:
    """Images without detail: a Gaussian of an eighth of the shorter side."""
    from torchvision.transforms.functional import gaussian_blur

    side = min(x.shape[-2:])
    width = max(3, 2 * (side // 4) + 1)
    return gaussian_blur(x, [width, width], [max(side / 8, 0.5)] * 2)


def _area(curve: Tensor) -> Tensor:
    """(…, S + 1) → (…) by the trapezoidal rule."""
    return torch.trapezoid(curve, dx=1 / (curve.shape[-1] - 1), dim=-1)
