"""Lessons on weights: how scores become shares, and what shares say."""

# ruff: noqa: E501  (a paragraph of a text is one line)

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import Tensor

from vision_attn.attention import attend, attention_weights, collect_log_probs
from vision_attn.explain.figures import COLORS, GREY, figure
from vision_attn.lessons.registry import Numbers, Text, lesson
from vision_attn.lessons.scores import shared_out
from vision_attn.lessons.wording import Say

WIDTHS = (16, 64, 256)
DRAWS = 20_000


def draw_normalize(numbers: Numbers, path: Path, say: Say) -> None:
    with figure(path, (7, 2.6), 1, 2) as (_, axes):
        for axis, key, title in (
            (axes[0][0], "plain", say("divided by the sum", "除以总和")),
            (axes[0][1], "soft", "softmax"),
        ):
            names = [f"{score:.0f}" for score in numbers["mixed"]]
            bars = axis.bar(names, numbers[key], color=[COLORS[0] if x >= 0 else COLORS[1] for x in numbers[key]])
            axis.bar_label(bars, [f"{x:.3f}" for x in numbers[key]])
            axis.axhline(0, color="black", lw=0.8)
            axis.set(title=title, xlabel=say("score", "分数"), ylabel=say("share", "份额"), ylim=(-0.7, 1.8))


@lesson(
    "normalize",
    proofs=("9", "10"),
    draw=draw_normalize,
    en=Text(
        "From scores to shares: why softmax",
        """
Dividing by the sum makes shares of scores that are not negative. Scores 1 and −1 sum to zero, and the core refuses: “{refusal}”
A zero sum is not the only trouble: 3 and −1 sum to 2, and dividing gives “shares” of {plain[0]:.2f} and {plain[1]:.2f}. Softmax takes exponentials first, which are positive, and then divides: {soft[0]:.3f} and {soft[1]:.3f}.
Adding 100 to all scores changes nothing ({shift:.0e}), so the largest can be subtracted first. That matters in half precision, where exp(12) is already infinite: of the scores 10000, 9992 and −10000 the formula taken literally makes {naive}, the core {stable[0]:.4f}, {stable[1]:.4f} and {stable[2]:.4f}.
""",
        "{csdn} sees the danger of a zero sum only. Negative shares are the more common one: they mean nothing, and come long before the sum is zero. And softmax is not “turning numbers into exponentials” alone: it still divides by their sum.",
    ),
    zh=Text(
        "从分数到份额：为什么用 softmax",
        """
分数都不为负时，除以总和就得到份额。分数 1 和 −1 的总和是零，程序会拒绝：“{refusal}”
总和为零还不是唯一的麻烦：3 和 −1 的总和是 2，相除得到“份额” {plain[0]:.2f} 和 {plain[1]:.2f}。softmax 先取指数，使每个数都为正，再除以总和：{soft[0]:.3f} 和 {soft[1]:.3f}。
给所有分数加上 100，结果不变（相差 {shift:.0e}），所以可以先减去最大的分数。半精度下这一点很要紧，因为 exp(12) 已经是无穷大：对分数 10000、9992 和 −10000，照公式硬算得到 {naive}，本库得到 {stable[0]:.4f}、{stable[1]:.4f} 和 {stable[2]:.4f}。
""",
        "{csdn}只提到总和为零的危险。更常见的是负的份额：它毫无意义，而且远在总和为零之前就会出现。另外，softmax 也不只是“化作指数形式”，最后仍要除以总和。",
    ),
)
def normalize() -> Numbers:
    try:
        refusal = str(shared_out([1.0, -1.0]))
    except ValueError as error:
        refusal = str(error)
    mixed = torch.tensor([3.0, -1.0], dtype=torch.float64)
    soft = shared_out(mixed.tolist(), "softmax")
    shifted = shared_out((mixed + 100).tolist(), "softmax")
    large = torch.tensor([1e4, 9992.0, -1e4], dtype=torch.float16)
    one = torch.ones(1, 1, 1, 1, dtype=torch.float16)
    naive = large.exp() / large.exp().sum()
    return {
        "refusal": refusal,
        "mixed": mixed.tolist(),
        "plain": (mixed / mixed.sum()).tolist(),
        "soft": soft,
        "shift": max(abs(a - b) for a, b in zip(soft, shifted, strict=True)),
        "naive": ", ".join(f"{x:.3g}" for x in naive.tolist()),
        "stable": attention_weights(one, large[None, None, :, None], score="dot")[0, 0, 0].tolist(),
    }


def draw_sqrt_d(numbers: Numbers, path: Path, say: Say) -> None:
    widths = [str(d) for d in WIDTHS]
    panels = (
        ("variance", say("variance of the scores", "分数的方差"), "log"),
        ("largest", say("largest of 16 weights, mean", "16 个权重中最大者（平均）"), "linear"),
        ("slope", say("gradient through the softmax", "softmax 的梯度大小"), "log"),
    )
    with figure(path, (9, 2.7), 1, 3) as (_, axes):
        for axis, (key, title, scale) in zip(axes[0], panels, strict=True):
            axis.plot(widths, numbers[key]["dot"], "o-", color=COLORS[1], label="q·k")
            axis.plot(widths, numbers[key]["scaled_dot"], "o-", color=COLORS[0], label="q·k/√d")
            axis.set(title=title, xlabel=say("width d", "宽度 d"), yscale=scale)
        axes[0][1].set_ylim(0, 1.05)
        axes[0][0].legend()


@lesson(
    "sqrt-d",
    proofs=("5",),
    draw=draw_sqrt_d,
    en=Text(
        "√d keeps the softmax awake",
        """
Take queries and keys whose entries have mean 0 and variance 1. Their dot product is a sum of d such products, so its variance is d. Over 2,000 queries with 16 keys each:
         variance of a score      largest of 16 weights    gradient of the softmax
  d         q·k       q·k/√d         q·k       q·k/√d         q·k       q·k/√d
{table}
Without √d one key takes nearly all at once and the gradient (the size of the softmax's Jacobian) dies away: at d = {widths[2]} it is {ratio:.1f} times smaller than with √d. Divided by √d, scores have variance 1 at any width.
""",
        "{csdn} calls √d a mere convenience of calculation. It is what keeps training possible at larger widths, as Vaswani et al. (2017) say in a footnote and {attentions} says rightly. {principles} leaves it out of its matrix form altogether.",
    ),
    zh=Text(
        "√d 让 softmax 保持灵敏",
        """
设查询和键的每个分量均值为 0、方差为 1。点积是 d 个这样的乘积之和，所以方差是 d。取 2,000 个查询，每个对应 16 个键：
             分数的方差            16 个权重中最大者           softmax 的梯度
  d         q·k       q·k/√d         q·k       q·k/√d         q·k       q·k/√d
{table}
不除以 √d，一个键几乎立刻独占全部权重，梯度（softmax 雅可比矩阵的大小）随之消失：d = {widths[2]} 时，它只有除以 √d 时的 1/{ratio:.1f}。除以 √d 之后，无论多宽，分数的方差都是 1。
""",
        "{csdn}说除以 √d 只是“为了方便计算的一种手段罢了”。其实正是它使宽度较大时仍能训练，Vaswani 等人（2017）在脚注中说明了原因，{attentions}的解释也是对的。{principles}的矩阵形式则完全漏掉了它。",
    ),
)
def sqrt_d() -> Numbers:
    found: Numbers = {key: {"dot": [], "scaled_dot": []} for key in ("variance", "largest", "slope")}
    generator = torch.Generator().manual_seed(0)
    for d in WIDTHS:
        q, k = (torch.randn(2000, 1, n, d, generator=generator) for n in (1, 16))
        for score in ("dot", "scaled_dot"):
            weights = attention_weights(q, k, score=score).flatten(0, -2)  # (2000, 16)
            # a score is the logarithm of its weight, up to a constant of its row
            scores = (q @ k.transpose(-1, -2)).flatten() / (1.0 if score == "dot" else math.sqrt(d))
            found["variance"][score].append(float(scores.var()))
            found["largest"][score].append(float(weights.amax(-1).mean()))
            found["slope"][score].append(float(_jacobian(weights).flatten(1).norm(dim=1).mean()))
    found["widths"] = WIDTHS
    found["ratio"] = found["slope"]["scaled_dot"][-1] / found["slope"]["dot"][-1]
    found["table"] = _rows(found)
    return found


def _rows(numbers: Numbers) -> str:
    """A line for every width: each quantity without and with √d."""
    pairs = [numbers[key] for key in ("variance", "largest", "slope")]
    return "\n".join(
        f"  {d:<4}" + "".join(f"{pair['dot'][i]:9.3f}{pair['scaled_dot'][i]:13.3f}   " for pair in pairs).rstrip()
        for i, d in enumerate(WIDTHS)
    )


def _jacobian(weights: Tensor) -> Tensor:
    """(…, M, M) derivatives of softmax weights to their scores."""
    return torch.diag_embed(weights) - weights[..., :, None] * weights[..., None, :]


def draw_soft_hard(numbers: Numbers, path: Path, say: Say) -> None:
    with figure(path, (7.5, 2.7), 1, 2) as (_, axes):
        left, right = axes[0]
        left.plot(range(1, len(numbers["running"]) + 1), numbers["running"], color=COLORS[0], lw=1.2)
        left.axhline(numbers["soft"], color=COLORS[1], ls="--", label=say("soft attention", "软注意力"))
        left.set(
            xscale="log", xlabel=say("hard samples", "硬注意力的采样次数"), title=say("their mean", "采样的平均值")
        )
        left.legend()
        places = torch.arange(5)
        for shift, key, color, label in (
            (-0.2, "exact", GREY, say("through soft attention", "经软注意力")),
            (0.2, "reinforce", COLORS[0], "REINFORCE"),
        ):
            right.bar((places + shift).tolist(), numbers[key], 0.4, color=color, label=label)
        right.set(title=say("gradient of the mean result", "平均结果的梯度"), xlabel=say("key", "键"))
        right.legend()


@lesson(
    "soft-hard",
    proofs=("11", "12"),
    draw=draw_soft_hard,
    en=Text(
        "Soft and hard attention",
        """
Five keys have the weights {weights}; their values are {values}.
Soft attention mixes them: Σ aᵢvᵢ = {soft:.4f}. Hard attention takes one: the likeliest gives {argmax:.4f}, or it draws one by the weights. {draws:,} draws average {mean:.4f} (standard error {error:.4f}): soft attention is the mean of what hard attention draws.
A drawn index has no derivative. Through the soft result the scores get the gradient {gradients[0]}; through a hard one none at all (the result asks for a gradient: {hard_gradient}). REINFORCE (Williams 1992) estimates the same gradient from rewards: each draw's log-probability times its result minus a baseline, averaged: {gradients[1]}. The largest difference is {gap:.4f}, or {sigmas:.1f} standard errors.
""",
        "{mechanism} concludes that hard attention must be trained by reinforcement learning. It is the unbiased way; straight-through gradients (Bengio et al. 2013) are a biased one that trains by ordinary backpropagation, and the core has both.",
    ),
    zh=Text(
        "软注意力与硬注意力",
        """
五个键的权重是 {weights}，值是 {values}。
软注意力把它们混合起来：Σ aᵢvᵢ = {soft:.4f}。硬注意力只取其中一个：取最可能的得到 {argmax:.4f}，也可以按权重随机抽取。抽取 {draws:,} 次，平均为 {mean:.4f}（标准误 {error:.4f}）：软注意力就是硬注意力采样的期望。
抽到的下标没有导数。经过软注意力，分数得到梯度 {gradients[0]}；经过硬注意力则完全没有（结果是否需要梯度：{hard_gradient}）。REINFORCE（Williams 1992）用回报来估计同一个梯度：每次抽取的对数概率乘以（结果减去基线），再取平均：{gradients[1]}。最大相差 {gap:.4f}，即 {sigmas:.1f} 个标准误。
""",
        "{mechanism}说硬注意力需要通过强化学习来训练。这是无偏的办法；直通估计（straight-through，Bengio 等人 2013）虽然有偏，却可以用普通的反向传播训练。两种本库都有。",
    ),
)
def soft_hard() -> Numbers:
    values = torch.tensor([2.0, -1.0, 0.5, 4.0, 1.0])
    scores = torch.tensor([1.0, 0.2, -0.5, 0.4, 1.2], requires_grad=True)
    one, v = torch.ones(1, 1, 1, 1), values[None, None, :, None]
    k = scores[None, None, :, None]  # a query 1 gives the keys themselves as scores
    soft = attend(one, k, v, score="dot")
    exact = torch.autograd.grad(soft.sum(), scores, retain_graph=True)[0]
    hard = attend(one, k, v, score="dot", normalizer="hard")
    with torch.random.fork_rng(devices=[]), collect_log_probs() as collected:
        torch.manual_seed(0)
        drawn = attend(one.expand(1, 1, DRAWS, 1), k, v, score="dot", normalizer="sampled").flatten()
    reward = drawn.detach() - soft.detach().flatten()  # the mean is the baseline
    estimate = torch.autograd.grad((collected[0].flatten() * reward).mean(), scores, retain_graph=True)[0]
    chosen = (drawn.detach()[:, None] == values).float()
    weights = attention_weights(one, k, score="dot").detach().flatten()
    each = (chosen - weights) * reward[:, None]  # (draws, 5): ∇ log p is one-hot − weights
    worst = int((estimate - exact).abs().argmax())
    spread = float(each[:, worst].std()) / math.sqrt(DRAWS)
    steps = torch.arange(1, DRAWS + 1)
    return {
        "weights": _listed(weights),
        "values": _listed(values, 1),
        "soft": float(soft.detach()),
        "argmax": float(hard.detach()),
        "draws": DRAWS,
        "mean": float(drawn.detach().mean()),
        "error": float(drawn.detach().std()) / math.sqrt(DRAWS),
        "running": (drawn.detach().cumsum(0) / steps).tolist(),
        "hard_gradient": bool(hard.requires_grad),
        "exact": exact.tolist(),
        "reinforce": estimate.tolist(),
        "gradients": [_listed(exact), _listed(estimate)],
        "gap": float((estimate - exact).abs().max()),
        "sigmas": float((estimate - exact).abs().max()) / spread,
    }


def _listed(x: Tensor, digits: int = 3) -> str:
    return "(" + ", ".join(f"{value:.{digits}f}" for value in x.tolist()) + ")"


def draw_causes(numbers: Numbers, path: Path, say: Say) -> None:
    names = [f"{say('token', 'token')} {i + 1}" for i in range(3)]
    panels = (
        ("weights", say("weight: where it looks", "权重：看哪里")),
        ("effects", say("change of the result without it", "去掉它之后结果的变化")),
    )
    with figure(path, (6.5, 2.6), 1, 2) as (_, axes):
        for axis, (key, title) in zip(axes[0], panels, strict=True):
            bars = axis.bar(names, numbers[key], color=[COLORS[1], COLORS[0], COLORS[2]])
            axis.bar_label(bars, [f"{x:.3f}" for x in numbers[key]])
            axis.set(title=title, ylim=(0, 1.25 * max(numbers[key])))


@lesson(
    "causes",
    proofs=("38*",),
    draw=draw_causes,
    en=Text(
        "Weights are not causes",
        """
A query gives three tokens the weights {weights[0]:.2f}, {weights[1]:.2f} and {weights[2]:.2f}, and their values are {values[0]:g}, {values[1]:g} and {values[2]:g}. The result is {result:.2f}.
Hide one token at a time: the result changes by {effects[0]:.2f}, {effects[1]:.2f} and {effects[2]:.2f}. The token that is looked at most matters less than the one looked at least: a value near what the others mix to moves nothing, however much weight it has.
And two tokens with the same value can swap all their weight, here {swap:.2f}, while the result moves by {moved:.0e}. A map shows where a layer looked; what mattered is found by taking things away, as `vision-attn maps` does with its deletion and insertion curves.
""",
    ),
    zh=Text(
        "权重不是原因",
        """
一个查询给三个 token 的权重是 {weights[0]:.2f}、{weights[1]:.2f} 和 {weights[2]:.2f}，它们的值是 {values[0]:g}、{values[1]:g} 和 {values[2]:g}，结果是 {result:.2f}。
每次遮住一个 token，结果分别变化 {effects[0]:.2f}、{effects[1]:.2f} 和 {effects[2]:.2f}。看得最多的 token，影响反而不如看得最少的：只要它的值接近其余 token 的混合，权重再大也推不动结果。
两个值相同的 token 还可以互换全部权重（这里是 {swap:.2f}），而结果只变化 {moved:.0e}。注意力图说明一层看了哪里；要知道什么真正起作用，只能把东西拿掉再看，`vision-attn maps` 的删除与插入曲线就是这样做的。
""",
    ),
)
def causes() -> Numbers:
    weights, values = torch.tensor([0.7, 0.2, 0.1], dtype=torch.float64), torch.tensor([1.0, 0.0, 4.0]).double()
    one, k, v = torch.ones(1, 1, 1, 1).double(), weights.log()[None, None, :, None], values[None, None, :, None]
    result = float(attend(one, k, v, score="dot"))
    effects = []
    for hidden in range(3):
        mask = torch.arange(3)[None] != hidden
        effects.append(abs(float(attend(one, k, v, score="dot", mask=mask)) - result))
    twins = torch.tensor([0.5, 0.5], dtype=torch.float64)[None, None, :, None]
    strong = torch.tensor([0.9, 0.1], dtype=torch.float64).log()[None, None, :, None]
    maps = [attention_weights(one, x, score="dot") for x in (strong, strong.flip(2))]
    results = [attend(one, x, twins, score="dot") for x in (strong, strong.flip(2))]
    return {
        "weights": attention_weights(one, k, score="dot").flatten().tolist(),
        "values": values.tolist(),
        "result": result,
        "effects": effects,
        "swap": float((maps[0] - maps[1]).abs().max()),
        "moved": float((results[0] - results[1]).abs().max()),
    }
