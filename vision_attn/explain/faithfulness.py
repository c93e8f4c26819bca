"""What a map is worth: deletion and insertion (Petsiuk et al. 2018, arXiv 1806.07421) against maps that know nothing.

Take away first what a map calls important, and the answer should fall soon; bring it back first, and the answer should
return soon. A map is only as good as its lead over maps drawn at random; gradient × input is the simple rival.

Legend: B images, S steps, T trials.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vision_attn.errors import UserError
from vision_attn.explain.planes import evaluating

CAUSES = "Attention weights say where information may come from; they are not causes of the answer."
RIVAL = "gradient × input"


@dataclasses.dataclass(frozen=True)
class Curve:
    """One map's curves over a set of images.

    Attributes:
        deletion, insertion: (B, S + 1) probability of the class, with 0, 1/S … all of the image taken away or brought
            back.
    """

    deletion: Tensor
    insertion: Tensor

    @property
    def score(self) -> Tensor:
        """(B,) area under insertion less area under deletion: −1 to 1, higher is better, about 0 for no knowledge."""
        return _area(self.insertion) - _area(self.deletion)


@dataclasses.dataclass(frozen=True)
class Faithfulness:
    """Curves of maps, of gradient × input and of random maps.

    Attributes:
        shares: (S + 1,) shares of the image.
        curves: name → curves; ``gradient × input`` among them.
        random: curves of the mean over trials of random maps.
        trials: (T, B) scores of random maps.
    """

    shares: Tensor
    curves: dict[str, Curve]
    random: Curve
    trials: Tensor

    def lead(self, name: str) -> tuple[float, float, float]:
        """Mean over images of a map's score less that of random maps, and its 95 % interval (Student's t over images).

        For a single image the interval is that of the random maps' scores.
        """
        ahead = (self.curves[name].score - self.trials.mean(0)).double()
        mean = float(ahead.mean())
        if len(ahead) > 1:
            from scipy.stats import t

            half = float(t.ppf(0.975, len(ahead) - 1)) * float(ahead.std()) / math.sqrt(len(ahead))
            return mean, mean - half, mean + half
        low, high = torch.quantile((self.curves[name].score - self.trials)[:, 0], torch.tensor([0.025, 0.975])).tolist()
        return mean, low, high

    def chance(self, name: str) -> float:
        """How often random maps do at least as well on these images: (1 + how many did) / (1 + trials)."""
        score, trials = self.curves[name].score.mean(), self.trials.mean(1)
        return (1 + float((trials >= score).sum())) / (1 + len(trials))

    def beats_random(self, name: str) -> bool:
        """Whether at most one in twenty random maps does as well, and, from five images on, the lead is no accident.

        With fewer images than five an interval over images says nothing, so that the answer is about those alone.
        """
        sure = len(self.random.deletion) < 5 or self.lead(name)[1] > 0
        return self.chance(name) <= 0.05 + 1e-9 and sure

    def verdict(self, name: str) -> str:
        """A few words for the title of a figure."""
        if self.beats_random(name):
            return f"better than random ({self.lead(name)[0]:+.2f}) on {self._where}"
        if 1 / (1 + len(self.trials)) > 0.05 + 1e-9:  # even a map that beats them all might do so by chance
            return f"{len(self.trials)} random maps are too few to tell on {self._where}"
        return f"NO BETTER THAN RANDOM on {self._where}"

    @property
    def _where(self) -> str:
        count = len(self.random.deletion)
        return f"these {count} images" if count > 1 else "this image"


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
    """Deletion and insertion curves of maps, against random maps and gradient × input.

    All maps are judged on the same cells and with the same number of steps. Deleted cells become the mean of the
    training set (0 after normalization); insertion begins with a blurred image, as in the paper.

    Args:
        model: left as it is.
        images: (B, C, H, W), normalized.
        maps: name → (B, R, C) or (B, H, W), higher is more important.
        classes: (B,) the class of each image; by default the likeliest.
        answer: images (B', C, H, W) → (B',) what is watched, for models that are no classifiers. Image ``i`` of a set
            of B is at ``i``, ``i + B`` … of those given. ``classes`` is not used then.
        cells: (rows, columns) the image is cut into; by default those of the first map, at most 16 × 16.
        steps: S.
        trials: T random maps. With 19, a map that beats them all does so by chance once in twenty times.
        batch_size: images per forward pass.
        seed: of the random maps.

    Raises:
        UserError: maps that do not belong to the images.
    """
    where = next(model.parameters())
    x = images.to(where.device, where.dtype)
    cells = _cells(maps, x, cells)
    with evaluating(model):
        if answer is None:
            answer, classes = _probability(model, x, classes)
        generator = torch.Generator().manual_seed(seed)
        given = {name: _on_cells(m.to(x.device), cells) for name, m in maps.items()}
        given[RIVAL] = _on_cells(gradient_times_input(model, x, answer), cells)
        shape = (trials, len(x), *cells)
        drawn = torch.rand(shape, generator=generator).to(x.device)
        ask = _Ask(answer, x, cells, steps, batch_size)
        curves = {name: ask.curve(m) for name, m in given.items()}
        random = [ask.curve(m) for m in drawn]
    mean = Curve(*(torch.stack([getattr(c, kind) for c in random]).mean(0) for kind in ("deletion", "insertion")))
    shares = torch.linspace(0, 1, steps + 1)
    return Faithfulness(shares, curves, mean, torch.stack([c.score for c in random]))


def joined(parts: Sequence[Faithfulness]) -> Faithfulness:
    """Images that were asked about one by one, as one set; of maps that all of them have."""
    names = [name for name in parts[0].curves if all(name in part.curves for part in parts)]

    def cat(curves: Sequence[Curve]) -> Curve:
        return Curve(torch.cat([c.deletion for c in curves]), torch.cat([c.insertion for c in curves]))

    together = {name: cat([part.curves[name] for part in parts]) for name in names}
    random = cat([part.random for part in parts])
    return Faithfulness(parts[0].shares, together, random, torch.cat([part.trials for part in parts], dim=1))


def gradient_times_input(model: nn.Module, images: Tensor, answer: Callable[[Tensor], Tensor]) -> Tensor:
    """(B, H, W): the size of gradient × input of each pixel, summed over channels."""
    x = images.detach().clone().requires_grad_()
    with torch.enable_grad():
        (gradient,) = torch.autograd.grad(answer(x).sum(), x)
    return (gradient * x).detach().abs().sum(1)


def _probability(model: nn.Module, x: Tensor, classes: Tensor | None) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    logits = model(x)
    if not isinstance(logits, Tensor) or logits.dim() != 2:
        raise UserError(f"{type(model).__name__} gives no logits of classes: say what to watch with answer=….")
    chosen = logits.argmax(-1) if classes is None else classes.to(x.device)

    def answer(images: Tensor) -> Tensor:
        out = model(images).float()
        picked = chosen.repeat(-(-len(out) // len(chosen)))[: len(out), None]
        return (out.gather(1, picked)[:, 0] - out.logsumexp(1)).exp()

    return answer, chosen


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

    def __post_init__(self) -> None:
        self.blurred = _blur(self.x)

    def curve(self, m: Tensor) -> Curve:
        order = m.flatten(1).argsort(dim=1, descending=True).argsort(dim=1)  # (B, cells) rank of each cell
        count = order.shape[1]
        shown: list[Tensor] = []
        for step in range(self.steps + 1):
            taken = (order < round(count * step / self.steps)).view(-1, 1, *self.cells).to(self.x.dtype)
            mask = F.interpolate(taken, size=self.x.shape[-2:], mode="nearest")
            shown += [self.x * (1 - mask), self.x * mask + self.blurred * (1 - mask)]
        answers = self._ask(torch.stack(shown))  # (2 (S + 1), B)
        return Curve(answers[0::2].T.contiguous(), answers[1::2].T.contiguous())

    def _ask(self, shown: Tensor) -> Tensor:
        batch, at_once = shown.shape[1], max(1, self.batch_size // shown.shape[1])
        answers = [self.answer(part.flatten(0, 1)).view(-1, batch) for part in shown.split(at_once)]
        return torch.cat(answers).float().cpu()


def _blur(x: Tensor) -> Tensor:
    """Images without detail: a Gaussian of an eighth of the shorter side."""
    from torchvision.transforms.functional import gaussian_blur

    side = min(x.shape[-2:])
    width = max(3, 2 * (side // 4) + 1)
    return gaussian_blur(x, [width, width], [max(side / 8, 0.5)] * 2)


def _area(curve: Tensor) -> Tensor:
    """(B, S + 1) → (B,) by the trapezoidal rule."""
    return torch.trapezoid(curve, dx=1 / (curve.shape[1] - 1), dim=1)
