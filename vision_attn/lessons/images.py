"""Lessons on images: patches, fields of view, windows, and objects that are asked for."""

# ruff: noqa: E501  (a paragraph of a text is one line)

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from vision_attn.attention import Attention, Layout, attention_weights
from vision_attn.attention.windows import ShiftedWindows
from vision_attn.detection.matcher import MatchingCosts, PaddedTargets, Stack, cost_matrix, match
from vision_attn.explain.figures import COLORS, figure
from vision_attn.layers.embed import PatchEmbed
from vision_attn.lessons.registry import Numbers, Text, lesson
from vision_attn.lessons.sequences import gap
from vision_attn.lessons.wording import Say
from vision_attn.models import create_model


def draw_patches(numbers: Numbers, path: Path, say: Say) -> None:
    with figure(path, (6.5, 2.6), 1, 2) as (_, axes):
        left, right = axes[0]
        image = torch.tensor(numbers["image"])
        left.imshow(image, cmap="gray")
        for edge in range(0, 17, 4):
            left.axhline(edge - 0.5, color=COLORS[1], lw=1.2)
            left.axvline(edge - 0.5, color=COLORS[1], lw=1.2)
        left.set(title=say("an image in 16 patches", "图像切成 16 块"), xticks=[], yticks=[])
        right.imshow(torch.stack(list(image.unfold(0, 4, 4).unfold(1, 4, 4).reshape(16, 16))), cmap="gray")
        right.set(title=say("the same as 16 tokens of 16 pixels", "排成 16 个 token，每个 16 像素"))
        right.set(xlabel=say("pixel", "像素"), ylabel="token", xticks=[], yticks=[])


@lesson(
    "patches",
    proofs=("27*", "17*"),
    draw=draw_patches,
    en=Text(
        "What goes in: one-hot words, embedded words, patches",
        """
One-hot vectors of different words have the dot product {onehot:.0f}: all are equally unlike. Multiplied by a matrix E they become rows of E, which can be alike or not; the multiplication is a mere look-up (difference {lookup:.0e}).
An image is cut into patches, and a linear layer makes a token of each. Cutting and projecting equals one convolution whose stride is the patch size ({conv:.0e}).
  ViT-Base: 224 × 224 pixels, patches of 16 × 16    → {tokens} tokens
  the same image, a token per pixel                 → {pixels:,} tokens, {pairs:,} times as many pairs
A fully connected layer over all tokens needs weights for every place: {dense4:,} for 4 tokens of width 8, {dense64:,} for 64. Self-attention needs {attn:,} for any number.
""",
    ),
    zh=Text(
        "输入是什么：独热词、词嵌入、图像块",
        """
不同词的独热向量点积为 {onehot:.0f}：彼此全都一样不像。乘以矩阵 E 之后就成了 E 的各行，可以相似也可以不相似；这个乘法其实只是查表（相差 {lookup:.0e}）。
图像先切成块，再由线性层把每块变成一个 token。先切块再投影，等于一次步长为块大小的卷积（相差 {conv:.0e}）。
  ViT-Base：224 × 224 像素，块大小 16 × 16   → {tokens} 个 token
  同一幅图像，每个像素一个 token             → {pixels:,} 个 token，两两配对的数目是前者的 {pairs:,} 倍
覆盖所有 token 的全连接层，每个位置都要有自己的权重：宽度为 8 时，4 个 token 要 {dense4:,} 个，64 个 token 要 {dense64:,} 个。自注意力不论多少 token 都只要 {attn:,} 个。
""",
    ),
)
def patches() -> Numbers:
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        table, words = torch.randn(7, 5), torch.tensor([2, 6, 0])
        onehot = F.one_hot(words, 7).float()
        embed, image = PatchEmbed(4, 3, 8), torch.randn(1, 3, 16, 16)
        unfolded = F.unfold(image, 4, stride=4).transpose(1, 2)  # (B, patches, 3 · 16)
        linear = F.linear(unfolded, embed.proj.weight.flatten(1), embed.proj.bias)
        side = torch.linspace(-1, 1, 16)
        disc = (side[:, None] ** 2 + (side[None] - 0.2) ** 2 < 0.5).float() + 0.3 * side[None]
        grid = PatchEmbed(16, 3, 8).grid((224, 224))
        return {
            "onehot": float(onehot[0] @ onehot[1]),
            "lookup": gap(onehot @ table, table[words]),
            "conv": gap(linear, embed(image)),
            "tokens": grid[0] * grid[1],
            "pixels": 224 * 224,
            "pairs": (224 * 224 // (grid[0] * grid[1])) ** 2,
            "dense4": _count(nn.Linear(4 * 8, 4 * 8, bias=False)),
            "dense64": _count(nn.Linear(64 * 8, 64 * 8, bias=False)),
            "attn": _count(Attention(8, 2, qkv_bias=False, proj_bias=False)),
            "image": disc.tolist(),
        }


def _count(layer: nn.Module) -> int:
    return sum(p.numel() for p in layer.parameters())


def draw_reach(numbers: Numbers, path: Path, say: Say) -> None:
    panels = [(f"{depth} × 3 × 3 {say('convolutions', '卷积')}", field) for depth, field in numbers["fields"].items()]
    panels.append((say("one layer of attention", "一层注意力"), numbers["attended"]))
    with figure(path, (2.1 * len(panels), 2.5), 1, len(panels)) as (_, axes):
        for axis, (title, field) in zip(axes[0], panels, strict=True):
            axis.imshow(field, cmap="Blues", vmin=0, vmax=1.3)
            axis.set(title=title, xticks=[], yticks=[])


@lesson(
    "reach",
    proofs=("29*",),
    draw=draw_reach,
    en=Text(
        "How far a layer sees: convolution and attention",
        """
How many pixels of a 32 × 32 image can move the feature in its middle? Counted by gradients:
  3 × 3 convolutions, 1 / 2 / 4 / 8 layers     {conv[0]} / {conv[1]} / {conv[2]} / {conv[3]} of 1,024
  self-attention over 8 × 8 patches, 1 layer   {attn:,} of 1,024
A convolution's field is laid down by hand, and its weights are the same for every image. Attention makes its weights from the image: for two random images they differ by up to {differ:.3f}, where even weights would be {even:.3f}. Near or far is then a matter of training.
""",
        "{principles} says that a CNN, with its field fixed by hand, “is not likely to be overfitting”, and measures nothing. A built-in assumption helps where it fits the data and few images teach otherwise; whether it does on yours is a question to be measured: `vision-attn contrast` trains both on growing subsets of the same images, with intervals, and may contradict the sentence.",
    ),
    zh=Text(
        "一层能看多远：卷积与注意力",
        """
在 32 × 32 的图像上，有多少像素能影响正中间的特征？用梯度来数：
  3 × 3 卷积，1 / 2 / 4 / 8 层        {conv[0]} / {conv[1]} / {conv[2]} / {conv[3]}（共 1,024 个）
  8 × 8 个图像块上的自注意力，1 层    {attn:,}（共 1,024 个）
卷积的感受野由人事先定好，权重对每幅图像都一样。注意力的权重则由图像算出：对两幅随机图像，权重最多相差 {differ:.3f}，而平均分配时每个权重才 {even:.3f}。看近还是看远，就由训练来决定。
""",
        "{principles}说 CNN 的感受野由人工设定，因而“不容易发生过拟合”，但没有给出任何测量。先验假设在符合数据、而图像又不多的时候才有帮助；对你的数据是否如此，需要实测：`vision-attn contrast` 在同一批图像逐渐增大的子集上训练两者，并给出置信区间，结果也可能与这句话相反。",
    ),
)
def reach() -> Numbers:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        fields: dict[int, Any] = {}
        for depth in (1, 2, 4, 8):
            layers = [nn.Conv2d(1, 1, 3, padding=1, bias=False) for _ in range(depth)]
            fields[depth] = _seen(nn.Sequential(*layers), torch.randn(1, 1, 32, 32), lambda y: y[0, 0, 16, 16])
        embed, layer = PatchEmbed(4, 1, 16), Attention(16, 2)
        attend = nn.Sequential(embed, layer)
        attended = _seen(attend, torch.randn(1, 1, 32, 32), lambda y: y[0, 36].sum())
        with torch.no_grad():
            x = embed(2 * torch.randn(2, 1, 32, 32))
            q, k = (F.linear(x, w) for w in layer.qkv.weight.chunk(3)[:2])
            maps = attention_weights(q[:, None], k[:, None])
    return {
        "fields": {depth: field.tolist() for depth, field in fields.items()},
        "conv": [int(field.sum()) for field in fields.values()],
        "attended": attended.tolist(),
        "attn": int(attended.sum()),
        "differ": gap(maps[0], maps[1]),
        "even": 1 / 64,
    }


def _seen(model: nn.Module, image: Tensor, read: Any) -> Tensor:
    """(H, W) 1 where a pixel has a derivative."""
    image.requires_grad_()
    (gradient,) = torch.autograd.grad(read(model(image)), image)
    return (gradient[0, 0] != 0).float()


def draw_windows(numbers: Numbers, path: Path, say: Say) -> None:
    panels = [
        (say("windows", "窗口"), numbers["cut"], 0),
        (say("shifted windows", "移位后的窗口"), numbers["shifted_cut"], 0),
        (say("seen after two layers\nwithout shift", "两层之后看到的\n（不移位）"), numbers["still"], 1),
        (say("seen after two layers\nwith shift", "两层之后看到的\n（移位）"), numbers["moved"], 1),
    ]
    with figure(path, (8.4, 2.6), 1, 4) as (_, axes):
        for axis, (title, field, kind) in zip(axes[0], panels, strict=True):
            axis.imshow(field, cmap="Blues" if kind else "tab10", vmin=0, vmax=1.3 if kind else 9)
            axis.plot(3, 3, "o", color="black", ms=5)
            axis.set(title=title, xticks=[], yticks=[])


@lesson(
    "windows",
    proofs=("31*", "22*"),
    draw=draw_windows,
    en=Text(
        "Windows and their shift",
        """
On a grid of 8 × 8 patches every patch may attend to every other, {full:,} pairs; or only to those in its window of 4 × 4, {few:,} pairs. Cost then grows with the number of patches and not with its square. The first stage of Swin-T, 56 × 56 patches of width 96, windows of 7 × 7, counted for this layer: {global_macs:.2f} G multiply-accumulates without windows, {window_macs:.3f} G with them.
Windows alone never talk to each other: after two layers, or a hundred, the patch at row 3, column 3 has seen {still_count} of 64. Shift the windows by half their side in every other layer and it has seen {moved_count} after two. Of all pairs, {still_share:.0%} are connected after four layers without shift, and {moved_share:.0%} with it.
Shifted windows at the border are cut off. Swin rolls the grid to keep all windows of one size and masks what were no neighbours; that equals full attention under the mask of the cut windows (proof below).
""",
        "{attentions} credits “shifted window attention” with the lower complexity. The windows lower it; the shift costs nothing and connects them.",
    ),
    zh=Text(
        "窗口与移位",
        """
在 8 × 8 个图像块上，每块可以关注所有的块，共 {full:,} 对；也可以只关注 4 × 4 窗口内的块，共 {few:,} 对。这样，代价随块数线性增长，而不是随其平方增长。Swin-T 的第一阶段有 56 × 56 个块，宽度 96，窗口 7 × 7；对这一层实际计数：不用窗口是 {global_macs:.2f} G 次乘加，用窗口是 {window_macs:.3f} G 次。
只有窗口，窗口之间就永远不通消息：无论两层还是一百层，第 3 行第 3 列（从 0 数起）的块都只看到 64 块中的 {still_count} 块。每隔一层把窗口移动半个边长，两层之后它就看到了 {moved_count} 块。四层之后，不移位时所有配对中有 {still_share:.0%} 连通，移位时有 {moved_share:.0%}。
移位后，边界上的窗口会被截断。Swin 用循环滚动让所有窗口保持同样大小，再遮住原本不相邻的块；这等价于在截断窗口的掩码下做全局注意力（见下面的验证）。
""",
        "{attentions}把复杂度的降低归功于“移位窗口注意力”。降低复杂度的是窗口；移位不增加代价，作用是把窗口连通起来。",
    ),
)
def windows() -> Numbers:
    layout = Layout(0, (8, 8))
    plain, shifted = (ShiftedWindows(4, shift).mask(64, layout) for shift in (0, 2))
    place = 3 * 8 + 3
    still, moved = (plain.float() @ plain.float() > 0), (shifted.float() @ plain.float() > 0)
    four = [(one.float() @ one.float() > 0).float().mean() for one in (still, moved)]
    macs = []
    choices: tuple[dict[str, Any], ...] = ({}, {"pattern": "shifted_windows", "window": 7})
    for words in choices:
        layer = Attention(96, 3, layout=Layout(0, (56, 56)), kernel="explicit", **words).to("meta").eval()
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            layer(torch.empty(1, 56 * 56, 96, device="meta"), layout=Layout(0, (56, 56)))
        macs.append(counter.get_total_flops() / 2e9)
    return {
        "full": 64 * 64,
        "few": int(plain.sum()),
        "global_macs": macs[0],
        "window_macs": macs[1],
        "cut": _numbered(plain),
        "shifted_cut": _numbered(shifted),
        "still": still[place].view(8, 8).float().tolist(),
        "moved": moved[place].view(8, 8).float().tolist(),
        "still_count": int(still[place].sum()),
        "moved_count": int(moved[place].sum()),
        "still_share": float(four[0]),
        "moved_share": float(four[1]),
    }


def _numbered(mask: Tensor) -> list[list[int]]:
    """(8, 8) numbers of windows: patches of one window may attend to the same ones."""
    firsts = mask.int().argmax(-1)
    return torch.unique(firsts, return_inverse=True)[1].view(8, 8).tolist()


def draw_queries(numbers: Numbers, path: Path, say: Say) -> None:
    with figure(path, (8.5, 2.9), 1, 2) as (_, axes):
        left, right = axes[0]
        for boxes, color, name in (
            (numbers["boxes"], COLORS[0], say("a query", "查询")),
            (numbers["objects"], COLORS[1], say("an object", "目标")),
        ):
            for i, (x, y, w, h) in enumerate(boxes):
                left.plot(
                    [x - w / 2, x + w / 2, x + w / 2, x - w / 2, x - w / 2],
                    [y - h / 2, y - h / 2, y + h / 2, y + h / 2, y - h / 2],
                    color=color,
                    label=name if i == 0 else None,
                )
                corner = (x + w / 2, y - h / 2) if color == COLORS[0] else (x - w / 2, y + h / 2)
                left.text(*corner, i, color=color, fontsize=8)
        left.set(xlim=(0, 1), ylim=(1, 0), aspect="equal", title=say("boxes", "框"))
        left.legend(fontsize=7, bbox_to_anchor=(1.02, 1), loc="upper left")
        right.imshow(numbers["cost"], cmap="viridis")
        for q, o in numbers["pairs"]:
            right.plot(o, q, "s", ms=16, mfc="none", mec=COLORS[1], mew=2)
        for row, line in enumerate(numbers["cost"]):
            for column, value in enumerate(line):
                color = "white" if value < 3 else "black"
                right.text(column, row, f"{value:.1f}", ha="center", va="center", color=color, fontsize=7)
        right.set(title=say("cost; the best pairing", "代价与最佳匹配"), ylabel=say("query", "查询"))
        right.set(xlabel=say("object", "目标"), xticks=range(len(numbers["objects"])))


@lesson(
    "queries",
    proofs=("19*",),
    draw=draw_queries,
    en=Text(
        "Object queries: a set of questions to an image",
        """
A small DETR asks an image {num} questions at once; each is a learned vector, and each answers with one class (or “nothing”) and one box. There are {num} answers for every image, whatever is in it. Here with random weights, for what holds before any training:
Reorder the questions, and the answers are reordered likewise ({equivariant:.0e}): a set, not a list. Make two questions alike, and their answers are alike ({twins:.0e}): only what is learned tells them apart. Change one question, and the answers of the others move by up to {others:.3f}: they hear of each other in the decoder's self-attention. That is how they can avoid naming one object twice.
In training each object is given to one question, so that the total cost is least (Hungarian algorithm). For 5 boxes and 2 objects the best pairing is {pairing}, cost {best:.2f}; trying all {ways} pairings finds none cheaper ({least:.2f}). The other 3 learn to say “nothing”. So no step is needed that throws doubles away.
""",
        "{attentions} says that object queries extract objects by cross-attention and that this makes non-maximum suppression superfluous. Cross-attention alone could not: a query that sees only the image does not know what the others have found. It takes the queries' self-attention and one-to-one matching.",
    ),
    zh=Text(
        "目标查询：向图像提出的一组问题",
        """
一个小型 DETR 同时向图像提出 {num} 个问题；每个问题是一个学到的向量，各自回答一个类别（或“没有”）和一个框。无论图中有什么，每幅图像都有 {num} 个回答。下面用随机权重，看看训练之前就成立的性质：
把问题换个次序，回答也跟着换（误差 {equivariant:.0e}）：它们是集合，不是列表。让两个问题相同，回答也相同（{twins:.0e}）：区分它们的只有学到的内容。改动一个问题，其他问题的回答最多变化 {others:.3f}：它们在解码器的自注意力中互通消息，因此能避免把一个目标说两遍。
训练时，每个目标分给一个问题，使总代价最小（匈牙利算法）。对 5 个框和 2 个目标，最佳匹配是 {pairing}，代价 {best:.2f}；试遍全部 {ways} 种匹配，也没有更便宜的（{least:.2f}）。其余 3 个学会回答“没有”。所以不再需要剔除重复框的步骤。
""",
        "{attentions}说目标查询通过交叉注意力提取目标，从而消除了 NMS。单靠交叉注意力做不到：只看图像的查询不知道别的查询找到了什么。还需要查询之间的自注意力和一对一的匹配。",
    ),
)
def queries() -> Numbers:
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        small: dict[str, Any] = {"img_size": 64, "embed_dim": 32, "enc_layers": 1, "dec_layers": 2, "num_queries": 8}
        model: Any = create_model("detr_tiny", **small).eval()
        image = torch.randn(1, 3, 64, 64)
        questions, order = model.queries.position.clone(), torch.randperm(8)

        def answers(asked: Tensor) -> Tensor:
            model.queries.position.copy_(asked)
            found = model(image)
            return torch.cat([found["pred_logits"], found["pred_boxes"]], -1)[0]

        before = answers(questions)
        twins, other = questions.clone(), questions.clone()
        twins[1], other[0] = twins[0], other[0] + 3.0
        alike, moved = answers(twins), answers(other)
        reordered = answers(questions[order])
    return {
        "num": len(before),
        "equivariant": gap(reordered, before[order]),
        "twins": gap(alike[0], alike[1]),
        "others": gap(moved[1:], before[1:]),
        **_matching(),
    }


def _matching() -> Numbers:
    """Five boxes with logits for two classes and none, and two objects."""
    boxes = torch.tensor(
        [[0.2, 0.3, 0.2, 0.3], [0.7, 0.6, 0.3, 0.4], [0.3, 0.3, 0.3, 0.3], [0.8, 0.2, 0.2, 0.2], [0.5, 0.8, 0.4, 0.2]]
    )
    logits = torch.tensor([[2.0, 0.0, 0.0], [0.0, 2.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 2.0], [0.0, 1.0, 1.0]])
    objects = torch.tensor([[0.27, 0.33, 0.3, 0.35], [0.68, 0.62, 0.35, 0.38]])
    targets = PaddedTargets.of([{"labels": torch.tensor([0, 1]), "boxes": objects}], "cpu")
    stack, costs = Stack(logits[None, None], boxes[None, None]), MatchingCosts()
    (found,) = match([stack], targets, costs)
    cost = cost_matrix(stack.logits, stack.boxes, targets, costs).reshape(5, 2)
    pairs = sorted(zip(found.query.tolist(), found.target.tolist(), strict=True), key=lambda pair: pair[1])
    every = [float(cost[a, 0] + cost[b, 1]) for a in range(5) for b in range(5) if a != b]
    return {
        "boxes": boxes.tolist(),
        "objects": objects.tolist(),
        "cost": cost.tolist(),
        "pairs": pairs,
        "pairing": ", ".join(f"{q} → {o}" for q, o in pairs),
        "best": sum(float(cost[q, o]) for q, o in pairs),
        "least": min(every),
        "ways": len(every),
    }
