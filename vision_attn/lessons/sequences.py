"""Lessons on sequences: order, masks, heads, and the layers made of them."""

# ruff: noqa: E501  (a paragraph of a text is one line)

from __future__ import annotations

import math
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from vision_attn.attention import Attention, attend, attention_weights, causal_mask, sinusoidal_1d
from vision_attn.explain.figures import COLORS, figure
from vision_attn.layers.decoder import DecoderLayer
from vision_attn.lessons.registry import Numbers, Text, lesson
from vision_attn.lessons.wording import Say


def gap(a: Tensor, b: Tensor) -> float:
    """The largest difference."""
    return float((a - b).detach().abs().max())


def draw_shuffle(numbers: Numbers, path: Path, say: Say) -> None:
    panels = (
        ("before", say("output", "输出")),
        ("after", say("output of the shuffled input", "打乱输入后的输出")),
        ("back", say("the same, put back in order", "再排回原来的次序")),
    )
    with figure(path, (8, 2.7), 1, 3) as (_, axes):
        for axis, (key, title) in zip(axes[0], panels, strict=True):
            axis.imshow(numbers[key], cmap="RdBu", vmin=-1, vmax=1)
            axis.set(title=title, xticks=[], xlabel=say("features", "特征"), ylabel="token")
            axis.set_yticks(range(6), numbers["order"] if key == "after" else range(6))


@lesson(
    "shuffle",
    proofs=("20", "21*"),
    draw=draw_shuffle,
    en=Text(
        "Shuffling the input shuffles the output",
        """
Six tokens go through a layer of self-attention, then the same tokens in the order {order}. The two outputs differ by up to {different:.2f}. Put back in order, the second equals the first to {equivariant:.0e}: each token gets the same result, in its new place.
Shuffling keys and values together, for queries that stay, changes nothing ({together:.0e}); shuffling the keys alone does ({alone:.2f}).
So attention without positions sees a bag of tokens: a picture cut into patches and shuffled is the same bag. With sinusoidal positions added, the shuffled tokens get other results, by up to {positions:.2f}.
""",
        "{principles} says that shuffling the input leaves the output the same. It is shuffled likewise (equivariant); only what forgets the order, such as the mean over tokens or a class token, stays the same (the mean here: {mean:.0e}). {mechanism} speaks of K and V alone, and is right.",
    ),
    zh=Text(
        "打乱输入，输出也随之打乱",
        """
六个 token 经过一层自注意力，再按 {order} 的次序送入一次。两次输出最多相差 {different:.2f}；把第二次的输出排回原来的次序，就与第一次相同（误差 {equivariant:.0e}）：每个 token 得到的结果不变，只是换了位置。
查询不动，把键和值一起打乱，结果不变（{together:.0e}）；只打乱键，结果就变了（{alone:.2f}）。
所以没有位置信息的注意力看到的只是一袋 token：把图像切块再打乱，还是同一袋。加上正弦位置编码后，打乱的 token 得到的结果就不同了，最多相差 {positions:.2f}。
""",
        "{principles}说打乱输入序列的顺序，输出结果依然一样。其实输出会以同样的方式被打乱（等变）；只有忘掉次序的量，例如对所有 token 取平均或类别 token，才保持不变（这里平均值的误差是 {mean:.0e}）。{mechanism}说的是只打乱 K 和 V，那是对的。",
    ),
)
def shuffle() -> Numbers:
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        layer, x = Attention(8, 2).eval(), 2 * torch.randn(1, 6, 8)
        q, k, v = (torch.randn(1, 1, 6, 4) for _ in range(3))
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    place = 2 * sinusoidal_1d(6, 8)
    with torch.no_grad():
        before, after = layer(x), layer(x[:, order])
        back = after[:, order.argsort()]
        return {
            "order": order.tolist(),
            "before": before[0].tolist(),
            "after": after[0].tolist(),
            "back": back[0].tolist(),
            "different": gap(before, after),
            "equivariant": gap(before, back),
            "together": gap(attend(q, k, v), attend(q, k[:, :, order], v[:, :, order])),
            "alone": gap(attend(q, k, v), attend(q, k[:, :, order], v)),
            "positions": gap(layer(x + place), layer(x[:, order] + place)[:, order.argsort()]),
            "mean": gap(before.mean(1), after.mean(1)),
        }


def draw_mask(numbers: Numbers, path: Path, say: Say) -> None:
    panels = (("mask", say("may attend", "允许关注")), ("weights", say("weights", "权重")))
    with figure(path, (6.2, 3), 1, 2) as (_, axes):
        for axis, (key, title) in zip(axes[0], panels, strict=True):
            axis.imshow(numbers[key], cmap="Blues", vmin=0, vmax=1.3)
            for row, line in enumerate(numbers[key]):
                for column, value in enumerate(line):
                    text = ("yes" if value else "no") if key == "mask" else f"{value:.2f}"
                    axis.text(
                        column,
                        row,
                        text,
                        ha="center",
                        va="center",
                        color="white" if value > 0.6 else "black",
                        fontsize=8,
                    )
            axis.set_xticks(range(4), [f"k{i + 1}" for i in range(4)])
            axis.set_yticks(range(4), [f"q{i + 1}" for i in range(4)])
            axis.set_title(title)


@lesson(
    "mask",
    proofs=("23*",),
    draw=draw_mask,
    en=Text(
        "The 4 × 4 mask: a token must not see the future",
        """
A model that writes a sequence may look back only. Its mask, and the weights of four random tokens under it:
         k1  k2  k3  k4        k1     k2     k3     k4
{table}
Hidden pairs get the weight {hidden:.0f}, and rows still sum to 1. Change the fourth token, and the first three results change by {past:.0e}, the fourth by {future:.2f}: the past does not know.
The diagonal belongs to the mask: without it the first token may look at nothing. Softmax over nothing is 0/0 = {plain}, and spoils everything it touches; the core gives zeros for such a row ({empty:.0f}), forward and backward.
""",
        "{mechanism} says once that tokens after i are hidden at step i, and later that only those before t are seen at step t. The first is right: a token sees itself.",
    ),
    zh=Text(
        "4 × 4 掩码：不许看未来",
        """
逐个生成序列的模型只能往回看。下面是它的掩码，以及四个随机 token 在掩码下的权重：
         k1  k2  k3  k4        k1     k2     k3     k4
{table}
被遮住的位置权重为 {hidden:.0f}，每行之和仍为 1。改动第四个 token，前三个结果变化 {past:.0e}，第四个变化 {future:.2f}：过去对未来一无所知。
掩码包含对角线：否则第一个 token 什么也看不到。对空集取 softmax 就是 0/0 = {plain}，它会污染碰到的一切；本库对这样的行给出零（{empty:.0f}），前向和反向都是如此。
""",
        "{mechanism}先说在时刻 i，大于 i 的时刻没有结果，后来又说只能对时刻 t 之前的输入计算注意力。前一种说法才对：token 看得到自己。",
    ),
)
def mask() -> Numbers:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, 4, 3, generator=generator) for _ in range(3))
    lower = causal_mask(4)
    weights = attention_weights(q, k, mask=lower)[0, 0]
    before = attend(q, k, v, mask=lower)
    changed = [x.clone() for x in (q, k, v)]
    for x in changed:
        x[:, :, 3] += 1.0
    moved = (attend(*changed, mask=lower) - before)[0, 0].abs().amax(-1)
    strict = lower.tril(-1)
    nothing = torch.full((4,), -math.inf).exp()  # a row without any key, taken literally
    lines = (
        f"  q{i + 1}     "
        + "   ".join("✓" if x else "✗" for x in lower[i])
        + "       "
        + "  ".join(f"{x:.3f}" for x in weights[i])
        for i in range(4)
    )
    return {
        "table": "\n".join(lines),
        "mask": lower.int().tolist(),
        "weights": weights.tolist(),
        "hidden": float(weights[~lower].abs().max()),
        "past": float(moved[:3].max()),
        "future": float(moved[3]),
        "plain": str(float(nothing[0] / nothing.sum())),
        "empty": float(attend(q, k, v, mask=strict)[0, 0, 0].abs().max()),
    }


def draw_matrix(numbers: Numbers, path: Path, say: Say) -> None:
    panels = (
        ("columns", say("column form: columns sum to 1", "列形式：每列之和为 1")),
        ("rows", say("row form: rows sum to 1", "行形式：每行之和为 1")),
    )
    with figure(path, (6, 2.8), 1, 2) as (_, axes):
        for axis, (key, title) in zip(axes[0], panels, strict=True):
            axis.imshow(numbers[key], cmap="viridis", vmin=0, vmax=1)
            for row, line in enumerate(numbers[key]):
                for column, value in enumerate(line):
                    axis.text(column, row, f"{value:.2f}", ha="center", va="center", color="white", fontsize=7)
            words = (say("query", "查询"), say("key", "键"))
            axis.set(title=title, xticks=[], yticks=[])
            axis.set(xlabel=words[key == "rows"], ylabel=words[key == "columns"])


@lesson(
    "matrix",
    proofs=("18",),
    draw=draw_matrix,
    en=Text(
        "Rows or columns: one matrix form transposed",
        """
Textbooks that stack tokens as columns write A = KᵀQ/√d, normalize every column, and mix O = V A′. Code stacks tokens as rows: A = QKᵀ/√d, every row, O = A′V. One is the other transposed: for four random tokens the results differ by {same:.0e}.
Mixing the two up goes unnoticed, since all shapes fit: column form with softmax over the rows is wrong by {axis:.2f}, and its outputs are no averages of values any more (weights of one output sum to {total[0]:.2f} … {total[1]:.2f}).
The matrices W_q, W_k and W_v know nothing of the number of tokens: the same {params} parameters serve 4 tokens and 400.
""",
        "{principles} writes A = KᵀQ without √d, which changes the result by {scale:.2f} here.",
    ),
    zh=Text(
        "按行还是按列：同一个矩阵形式的转置",
        """
教科书把 token 排成列，写作 A = KᵀQ/√d，对每一列归一化，再混合 O = V A′。程序把 token 排成行：A = QKᵀ/√d，对每一行归一化，O = A′V。两者互为转置：四个随机 token 的结果只差 {same:.0e}。
两种写法混用时，因为形状都对得上，错误不易察觉：列形式配上按行的 softmax，误差达 {axis:.2f}，输出也不再是值的平均（一个输出的权重之和在 {total[0]:.2f} 到 {total[1]:.2f} 之间）。
W_q、W_k、W_v 与 token 的数目无关：同样的 {params} 个参数，既能处理 4 个 token，也能处理 400 个。
""",
        "{principles}写作 A = KᵀQ，漏掉了 √d；在这里，结果因此相差 {scale:.2f}。",
    ),
)
def matrix() -> Numbers:
    generator = torch.Generator().manual_seed(3)
    q, k, v = (1.5 * torch.randn(4, 3, dtype=torch.float64, generator=generator) for _ in range(3))
    rows = attention_weights(q[None, None], k[None, None])[0, 0]  # (query, key)
    powers = (k @ q.T / math.sqrt(3)).exp()  # (key, query): written out, as a textbook has it
    columns, crossed = powers / powers.sum(0), powers / powers.sum(1, keepdim=True)
    out = attend(q[None, None], k[None, None], v[None, None])[0, 0]
    unscaled = attend(q[None, None], k[None, None], v[None, None], score="dot")[0, 0]
    layer = Attention(8, 2)
    for n in (4, 400):
        layer(torch.zeros(1, n, 8))
    return {
        "rows": rows.tolist(),
        "columns": columns.tolist(),
        "same": gap((v.T @ columns).T, out),
        "axis": gap((v.T @ crossed).T, out),
        "total": [float(crossed.sum(0).min()), float(crossed.sum(0).max())],
        "scale": gap(unscaled, out),
        "params": sum(p.numel() for p in layer.parameters()),
    }


def draw_heads(numbers: Numbers, path: Path, say: Say) -> None:
    with figure(path, (2.1 * len(numbers["maps"]), 2.5), 1, len(numbers["maps"])) as (_, axes):
        for head, (axis, weights) in enumerate(zip(axes[0], numbers["maps"], strict=True)):
            axis.imshow(weights, cmap="viridis", vmin=0, vmax=1)
            axis.set(title=f"{say('head', '头')} {head}", xticks=[], yticks=[], xlabel=say("key", "键"))
        axes[0][0].set_ylabel(say("query", "查询"))


@lesson(
    "heads",
    proofs=("14*", "34"),
    draw=draw_heads,
    en=Text(
        "Many heads cost no more than one",
        """
A token of width 16 can be compared in one way, or in four ways at once, each in 4 numbers of its own. Self-attention of 10 tokens:
  heads                        1        2        4        8
  parameters            {params[0]:8,} {params[1]:8,} {params[2]:8,} {params[3]:8,}
  multiply-accumulates  {macs[0]:8,} {macs[1]:8,} {macs[2]:8,} {macs[3]:8,}
Computing head after head, each with its own matrices, and projecting what they concatenate to gives the same result as all at once ({loop:.0e}).
Heads look elsewhere: two of the four random ones here differ by up to {differ:.2f} in a weight. They may also share: when two query heads share keys and values (grouped queries, as in Llama 2), a cache of them shrinks to {cache:.0%}.
""",
        "{mechanism} says that a query is cut into h parts. Each head projects the whole query by a matrix of its own; cutting the token itself would let a head see only its own slice. With the projections the parts are of the projected query, and every number of the token reaches every head.",
    ),
    zh=Text(
        "多头并不比单头更贵",
        """
宽度为 16 的 token 可以只用一种方式比较，也可以同时用四种方式比较，每种各用 4 个数。10 个 token 的自注意力：
  头数                         1        2        4        8
  参数量                {params[0]:8,} {params[1]:8,} {params[2]:8,} {params[3]:8,}
  乘加次数              {macs[0]:8,} {macs[1]:8,} {macs[2]:8,} {macs[3]:8,}
一个头一个头地算，各用各的矩阵，再把结果拼接、投影，与一次算完完全一致（误差 {loop:.0e}）。
各个头看的地方不同：这里四个随机的头，有两个的权重最多相差 {differ:.2f}。头也可以共享：两个查询头共用一组键和值时（分组查询，如 Llama 2），键值缓存缩小到 {cache:.0%}。
""",
        "{mechanism}说“将一个查询分为 h 部分”。其实每个头都用自己的矩阵投影整个查询；如果直接切开 token，一个头就只能看到自己那一段。被切开的是投影之后的查询，token 的每个分量都能影响每个头。",
    ),
)
def heads() -> Numbers:
    params, macs = [], []
    x = torch.randn(1, 10, 16, generator=torch.Generator().manual_seed(0)) * 2
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        for number in (1, 2, 4, 8):
            layer = Attention(16, number, kernel="explicit").eval()
            with FlopCounterMode(display=False) as counter:
                layer(x)
            macs.append(counter.get_total_flops() // 2)
            params.append(sum(p.numel() for p in layer.parameters()))
        layer, shared = Attention(16, 4).eval(), Attention(16, 4, num_kv_heads=2)
        weight, bias = layer.qkv.weight.view(3, 4, 4, 16), layer.qkv.bias.view(3, 4, 4)
        parts, maps = [], []
        for head in range(4):
            q, k, v = (x @ weight[i, head].T + bias[i, head] for i in range(3))
            maps.append(attention_weights(q[:, None], k[:, None])[0, 0])
            parts.append(attend(q[:, None], k[:, None], v[:, None])[:, 0])
        loop = torch.cat(parts, -1) @ layer.proj.weight.T + layer.proj.bias
        return {
            "params": params,
            "macs": macs,
            "loop": gap(loop, layer(x)),
            "maps": [m.tolist() for m in maps],
            "differ": max(gap(a, b) for a in maps for b in maps),
            "cache": shared.kv_width / layer.kv_width,
        }


def draw_decoder(numbers: Numbers, path: Path, say: Say) -> None:
    with figure(path, (5, 2.4)) as (_, axes):
        names = [say("self → cross → MLP", "自注意力→交叉→MLP"), say("self → MLP → cross", "自注意力→MLP→交叉")]
        bars = axes[0][0].barh(names, numbers["gaps"], color=[COLORS[0], COLORS[1]])
        axes[0][0].bar_label(bars, [f"{x:.1g}" for x in numbers["gaps"]], padding=3)
        title = say("largest difference from PyTorch's layer", "与 PyTorch 解码器层的最大差别")
        axes[0][0].set(title=title, xlim=(0, 1.2 * max(numbers["gaps"])))


@lesson(
    "decoder",
    proofs=("24*", "25*"),
    draw=draw_decoder,
    en=Text(
        "A decoder layer: listen to yourself, then ask, then think",
        """
The decoder layer of Vaswani et al. (2017) is self-attention, then cross-attention to what the encoder puts out, then the MLP. With copied weights ours equals PyTorch's nn.TransformerDecoderLayer to {gaps[0]:.0e}; with MLP and cross-attention exchanged, the results differ by {gaps[1]:.2f}.
Cross-attention is attention with two sequences: queries from one, keys and values from the other. Given the same sequence twice it is self-attention ({cross:.0e}). Its mask hides padding, never the future: all of the encoder's output is there from the start.
""",
        "{mechanism} puts the MLP second and cross-attention third, lets the latter attend to the encoder's input, and hides the future there. It is the self-attention of the decoder that hides the future, and the encoder's output that is asked.",
    ),
    zh=Text(
        "解码器层：先听自己，再去询问，最后思考",
        """
Vaswani 等人（2017）的解码器层依次是：自注意力，对编码器输出的交叉注意力，MLP。复制权重后，我们的层与 PyTorch 的 nn.TransformerDecoderLayer 相差 {gaps[0]:.0e}；若把 MLP 与交叉注意力对调，结果相差 {gaps[1]:.2f}。
交叉注意力就是涉及两个序列的注意力：查询来自一个，键和值来自另一个。两次都给同一个序列，它就是自注意力（误差 {cross:.0e}）。它的掩码只遮住填充，从不遮住未来：编码器的输出从一开始就已齐全。
""",
        "{mechanism}把全连接网络排在第二，交叉注意力排在第三，还让后者关注编码器的输入，并在那里遮住未来。其实遮住未来的是解码器的自注意力，被询问的是编码器的输出。",
    ),
)
def decoder() -> Numbers:
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        theirs = torch.nn.TransformerDecoderLayer(8, 2, 16, dropout=0.0, batch_first=True).eval()
        ours = DecoderLayer(8, 2, mlp_ratio=2.0, causal=True, pre_norm=False, act="relu", norm_eps=1e-5).eval()
        _copy(theirs, ours)
        x, context = 2 * torch.randn(1, 5, 8), 2 * torch.randn(1, 7, 8)
        future = ~causal_mask(5)
        expected = theirs(x, context, tgt_mask=future)
        self_first = ours.norm1(x + ours.self_attn(x))
        mlp_second = ours.norm3(self_first + ours.mlp(self_first))
        exchanged = ours.norm2(mlp_second + ours.cross_attn(mlp_second, context))
        layer = Attention(8, 2).eval()
        return {
            "gaps": [gap(ours(x, context), expected), gap(exchanged, expected)],
            "cross": gap(layer(x, x), layer(x)),
        }


def _copy(theirs: torch.nn.TransformerDecoderLayer, ours: DecoderLayer) -> None:
    """PyTorch's weights into our layer."""
    for mine, other in ((ours.self_attn, theirs.self_attn), (ours.cross_attn, theirs.multihead_attn)):
        mine.qkv.load_state_dict({"weight": other.in_proj_weight, "bias": other.in_proj_bias})
        mine.proj.load_state_dict(other.out_proj.state_dict())
    ours.mlp.fc1.load_state_dict(theirs.linear1.state_dict())
    ours.mlp.fc2.load_state_dict(theirs.linear2.state_dict())
    for norm in ("norm1", "norm2", "norm3"):
        getattr(ours, norm).load_state_dict(getattr(theirs, norm).state_dict())
