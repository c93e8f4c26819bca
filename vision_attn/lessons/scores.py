"""Lessons on scores: what is compared with what, and how."""

# ruff: noqa: E501  (a paragraph of a text is one line)

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vision_attn.attention import attention_weights, make_score
from vision_attn.explain.figures import COLORS, GREY, figure
from vision_attn.lessons.registry import Numbers, Text, lesson
from vision_attn.lessons.wording import Say

NATURAL, FLYING = (80.0, 60.0, 50.0, 30.0, 10.0), (20.0, 30.0, 10.0, 100.0, 10.0)
APPLE, ORANGE, IPHONE = (1.0, 2.0, 1.0), (2.0, 2.0, 0.0), (0.0, 2.0, 3.0)
CLAIMED = (1.0, 0.71, 0.5)  # the post's similarities of the apple to itself, the orange and the iPhone


def shared_out(scores: tuple[float, ...] | list[float], normalizer: str = "sum") -> list[float]:
    """Weights of a query 1 over keys that are the scores themselves."""
    keys = torch.tensor(scores, dtype=torch.float64)[None, None, :, None]
    one = torch.ones(1, 1, 1, 1, dtype=torch.float64)
    found: list[float] = attention_weights(one, keys, score="dot", normalizer=normalizer)[0, 0, 0].tolist()
    return found


def draw_bird(numbers: Numbers, path: Path, say: Say) -> None:
    things = [
        say(*pair)
        for pair in (("person", "人"), ("mountain", "山"), ("flowers", "花"), ("bird", "鸟"), ("ribbon", "绸带"))
    ]
    panels = (
        ("natural", say("at a first glance", "自然状态")),
        ("share", say("asked: what flies?", "问：什么会飞？")),
        ("soft", say("the same scores through softmax", "同样的打分改用 softmax")),
    )
    with figure(path, (9, 2.8), 1, 3) as (_, axes):
        for axis, (key, title) in zip(axes[0], panels, strict=True):
            bars = axis.bar(things, numbers[key], color=[COLORS[0]] * 3 + [COLORS[1]] + [COLORS[0]])
            axis.bar_label(bars, [f"{value:.3f}" for value in numbers[key]], fontsize=7.5)
            axis.set(ylim=(0, 1.1), title=title, ylabel=say("share of the budget", "所占份额"))
            axis.tick_params("x", rotation=30)


@lesson(
    "bird",
    proofs=("1", "2"),
    draw=draw_bird,
    en=Text(
        "The flying bird: attention shares out a budget",
        """
A picture shows a person, a mountain, flowers, a bird and a ribbon. Scores from 0 to 100 say how much each draws the eye. Divided by their sum they are weights: shares of one budget.
               person  mountain  flowers    bird  ribbon
  at a glance   {natural[0]:.3f}     {natural[1]:.3f}    {natural[2]:.3f}   {natural[3]:.3f}   {natural[4]:.3f}
  what flies?   {share[0]:.3f}     {share[1]:.3f}    {share[2]:.3f}   {share[3]:.3f}   {share[4]:.3f}
The question “what flies?” is the query. It changes the scores, and what the bird gains the others lose: a row of weights always sums to {total:.3f}.
Attention usually shares out by softmax, which sees differences and not ratios. Scores of this size then leave the bird {soft[3]:.6f} and the second best {second:.0e}: hardly a share. Scores must be kept small, which is what the lesson sqrt-d is about.
""",
        "{csdn} calls 80 and 20 weights, and takes the weights of the first glance for the keys. They are scores (its rows sum to {sums[0]:.0f} and {sums[1]:.0f}, not to 1). Keys are properties of the things, such as “has wings”; comparing the query with them gives scores, and only normalizing gives weights.",
    ),
    zh=Text(
        "会飞的鸟：注意力是在分配预算",
        """
一幅画里有人、山、花、鸟和绸带。用 0 到 100 的分数表示它们各自有多引人注意，再除以总和，就得到权重，也就是各自在一份预算里所占的份额。
                 人      山      花      鸟    绸带
  乍看一眼    {natural[0]:.3f}   {natural[1]:.3f}   {natural[2]:.3f}   {natural[3]:.3f}   {natural[4]:.3f}
  什么会飞？  {share[0]:.3f}   {share[1]:.3f}   {share[2]:.3f}   {share[3]:.3f}   {share[4]:.3f}
“什么会飞？”就是查询（query）。它改变了打分：鸟多得的，正是其他事物失去的，因为一行权重之和总是 {total:.3f}。
注意力通常用 softmax 来分配，而 softmax 只看分数之差，不看比值。分数这么大时，鸟得到 {soft[3]:.6f}，第二名只剩 {second:.0e}，几乎什么也分不到。所以分数不能太大，详见 sqrt-d 一课。
""",
        "{csdn}把 80、20 这样的数叫作权重，还把自然条件下的权重当成了键（key）。它们其实是分数（两行之和是 {sums[0]:.0f} 和 {sums[1]:.0f}，而不是 1）。键描述的是事物本身的特征，例如“有翅膀”；查询与键比较得到分数，归一化之后才是权重。",
    ),
)
def bird() -> Numbers:
    share, soft = shared_out(FLYING), shared_out(FLYING, "softmax")
    return {
        "natural": shared_out(NATURAL),
        "share": share,
        "soft": soft,
        "second": sorted(soft)[-2],
        "total": sum(share),
        "sums": [sum(NATURAL), sum(FLYING)],
    }


def _compare(score: str, a: tuple[float, ...], b: tuple[float, ...]) -> float:
    q, k = (torch.tensor(x, dtype=torch.float64)[None, None, None] for x in (a, b))
    return float(make_score(score)(q, k)) if score == "cosine" else float(make_score(score, 1, 3)(q, k))


def draw_apples(numbers: Numbers, path: Path, say: Say) -> None:
    names = [say("apple", "苹果"), say("orange", "橘子"), "iPhone"]
    panels = ((say("dot product with the apple", "与苹果的点积"), "dot"), (say("cosine", "余弦相似度"), "cosine"))
    with figure(path, (8.5, 2.8), 1, 3) as (_, axes):
        for axis, (title, key) in zip(axes[0], panels, strict=False):
            bars = axis.bar(names, numbers[key][:3], color=COLORS[:3])
            axis.bar_label(bars, [f"{value:.3g}" for value in numbers[key][:3]], fontsize=7.5)
            axis.set(title=title, ylim=(0, 1.2 * max(numbers[key])))
        places = torch.arange(3)
        for shift, key, color, label in (
            (-0.2, "claimed", GREY, say("by the post's numbers", "按原文的数")),
            (0.2, "weights", COLORS[1], say("by the true cosines", "按真正的余弦")),
        ):
            bars = axes[0][2].bar((places + shift).tolist(), numbers[key], 0.4, color=color, label=label)
            axes[0][2].bar_label(bars, [f"{value:.2f}" for value in numbers[key]], fontsize=7)
        axes[0][2].set_xticks(places.tolist(), names)
        axes[0][2].set(title=say("weights of the new apple", "新苹果的权重"), ylim=(0, 0.6))
        axes[0][2].legend(fontsize=7)


@lesson(
    "apples",
    proofs=("3", "4", "9"),
    draw=draw_apples,
    en=Text(
        "Apples and oranges: dot product and cosine",
        """
Three things as vectors of three features: apple (1, 2, 1), orange (2, 2, 0), iPhone (0, 2, 3). How alike are they?
                     apple · apple   apple · orange   apple · iPhone   orange · iPhone
  dot product             {dot[0]:5.0f}            {dot[1]:5.0f}            {dot[2]:5.0f}             {dot[3]:5.0f}
  cosine                  {cosine[0]:5.3f}            {cosine[1]:5.3f}            {cosine[2]:5.3f}             {cosine[3]:5.3f}
By dot product the iPhone is nearer to the apple than the orange is, nearer even than the apple itself: it is the longest vector, and length counts. The cosine compares directions only. For vectors of length 1 the two agree (to within {agree:.0e} here).
Weights from the cosines, {weights[0]:.3f} / {weights[1]:.3f} / {weights[2]:.3f}, mix the three into a new apple ({mixed[0]:.2f}, {mixed[1]:.2f}, {mixed[2]:.2f}): it has moved towards what it resembles. That is what a layer of self-attention does to every token.
""",
        "{csdn} gives the apple's similarities as 1, 0.71 and 0.5, which would make the weights {claimed[0]:.3f} / {claimed[1]:.3f} / {claimed[2]:.3f}. They do not follow from its vectors: the cosines are {cosine[0]:.3f}, {cosine[1]:.3f} and {cosine[2]:.3f}. (It also writes the apple as (1, 2, 3) first and as (1, 2, 1) later; we use the latter, as its sums do.)",
    ),
    zh=Text(
        "苹果和橘子：点积与余弦",
        """
用三个特征把三样东西写成向量：苹果 (1, 2, 1)、橘子 (2, 2, 0)、iPhone (0, 2, 3)。它们有多相似？
              苹果·苹果   苹果·橘子   苹果·iPhone   橘子·iPhone
  点积           {dot[0]:5.0f}       {dot[1]:5.0f}         {dot[2]:5.0f}         {dot[3]:5.0f}
  余弦           {cosine[0]:5.3f}       {cosine[1]:5.3f}         {cosine[2]:5.3f}         {cosine[3]:5.3f}
按点积算，iPhone 比橘子更像苹果，甚至比苹果自己还像：它的向量最长，而点积会受长度影响。余弦只比较方向。向量长度都为 1 时，两者一致（这里相差不超过 {agree:.0e}）。
用余弦作权重，{weights[0]:.3f} / {weights[1]:.3f} / {weights[2]:.3f}，把三者混合成新的苹果 ({mixed[0]:.2f}, {mixed[1]:.2f}, {mixed[2]:.2f})：它向与自己相似的东西靠近了。自注意力层对每个 token 做的正是这件事。
""",
        "{csdn}说苹果与三者的相似度是 1、0.71 和 0.5，照此权重应为 {claimed[0]:.3f} / {claimed[1]:.3f} / {claimed[2]:.3f}。这与它给的向量不符：余弦应为 {cosine[0]:.3f}、{cosine[1]:.3f} 和 {cosine[2]:.3f}。（文中苹果先写作 (1, 2, 3)，后写作 (1, 2, 1)；这里用后者，与它的算式一致。）",
    ),
)
def apples() -> Numbers:
    pairs = ((APPLE, APPLE), (APPLE, ORANGE), (APPLE, IPHONE), (ORANGE, IPHONE))
    dot, cosine = ([_compare(score, a, b) for a, b in pairs] for score in ("dot", "cosine"))
    unit = [tuple((torch.tensor(x).double() / torch.tensor(x).double().norm()).tolist()) for x in (APPLE, IPHONE)]
    weights = shared_out(cosine[:3])
    mixed = torch.tensor(weights) @ torch.tensor([APPLE, ORANGE, IPHONE])
    return {
        "dot": dot,
        "cosine": cosine,
        "agree": abs(_compare("dot", unit[0], unit[1]) - cosine[2]),
        "weights": weights,
        "claimed": shared_out(CLAIMED),
        "mixed": mixed.tolist(),
    }


def draw_scores(numbers: Numbers, path: Path, say: Say) -> None:
    with figure(path, (9, 2.4), 1, 4) as (_, axes):
        for axis, (name, weights) in zip(axes[0], numbers["maps"].items(), strict=True):
            axis.imshow(weights, cmap="viridis", vmin=0)
            axis.set(title=name, xlabel=say("key", "键"), xticks=[], yticks=[])
        axes[0][0].set_ylabel(say("query", "查询"))


@lesson(
    "scores",
    proofs=("5", "6", "7", "8"),
    draw=draw_scores,
    en=Text(
        "Four ways to compare a query with a key",
        """
Dot product q·k (Luong 2015): no parameters, and both must be equally wide. Given widths 3 and 5, the core answers: “{refusal}”
General qᵀWk (Luong 2015): W learns how the two correspond, and widths may differ; 3 and 5 give scores {general}. With W = I it is the dot product (difference {identity:.0e}).
Additive vᵀtanh(W_q q + W_k k) (Bahdanau 2015) and concat vᵀtanh(W[q; k]) (Luong 2015) are one function written twice: with W = [W_q W_k] they differ by {concat:.0e}.
Location (Luong 2015): scores come from the query alone, so what the keys hold cannot matter. With all keys replaced, weights change by {location:.0e}; those of the dot product by {content:.2f}.
""",
        "{attentions} says that location-based attention is mainly for data with a spatial layout such as images. It comes from translation, and means that the query alone says where to look. The same post prints Z ← Z² + C, the recipe of the Mandelbrot set, as its input sequence: a slip of its formulas, the rest of which are lost; ours are those of the papers it cites.",
    ),
    zh=Text(
        "查询与键的四种比较方法",
        """
点积 q·k（Luong 2015）：没有参数，两者必须等宽。宽度为 3 和 5 时，程序会报错：“{refusal}”
双线性 qᵀWk（Luong 2015，general）：由 W 学习两者如何对应，宽度可以不同；3 和 5 得到形状为 {general} 的分数。W = I 时就是点积（相差 {identity:.0e}）。
加性 vᵀtanh(W_q q + W_k k)（Bahdanau 2015）与拼接 vᵀtanh(W[q; k])（Luong 2015）是同一个函数的两种写法：取 W = [W_q W_k]，两者相差 {concat:.0e}。
基于位置（Luong 2015，location）：分数只由查询决定，键里装什么都无关紧要。把所有的键换掉，权重变化 {location:.0e}；换成点积则变化 {content:.2f}。
""",
        "{attentions}说基于位置的注意力主要用于图像等有空间结构的数据。其实它出自机器翻译，意思是只凭查询就决定看哪里。文中还把 Z ← Z² + C（曼德博集合的迭代式）印成了输入序列，这是公式转换出错，其余公式也已丢失；这里用的是它所引论文中的公式。",
    ),
)
def scores() -> Numbers:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        q, k, wide = torch.randn(1, 1, 4, 3), torch.randn(1, 1, 6, 3), torch.randn(1, 1, 6, 5)
        general: Any
        additive: Any
        concat: Any
        general, other = make_score("general", 1, 3), make_score("general", 1, 3, 5)
        additive, concat = make_score("additive", 1, 3), make_score("concat", 1, 3)
        location = make_score("location", 1, 3)
        changed = torch.randn_like(k)
    made: dict[str, Any] = {"dot": "dot", "general": general, "additive": additive, "location": location}
    with torch.no_grad():
        general.weight.copy_(torch.eye(3)[None])
        concat.weight.copy_(torch.cat([additive.query, additive.key], -1))
        concat.v.copy_(additive.v)
        maps = {name: attention_weights(q, k, score=score)[0, 0].tolist() for name, score in made.items()}
        try:
            refusal = str(attention_weights(q, wide, score="dot"))
        except ValueError as error:
            refusal = str(error)
        return {
            "maps": maps,
            "refusal": refusal,
            "general": f"{tuple(other(q, wide).shape[2:])}",
            "identity": _gap(general(q, k), make_score("dot", 1, 3)(q, k)),
            "concat": _gap(additive(q, k), concat(q, k)),
            "location": _gap(*(attention_weights(q, x, score=location) for x in (k, changed))),
            "content": _gap(*(attention_weights(q, x, score="dot") for x in (k, changed))),
        }


def _gap(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max())
