"""Lessons on what attention costs, and on weights that are the answer themselves."""

# ruff: noqa: E501  (a paragraph of a text is one line)

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode

from vision_attn.attention import Attention, Layout, attend, attention_weights
from vision_attn.attention.patterns import Window
from vision_attn.explain.figures import COLORS, figure
from vision_attn.lessons.registry import Numbers, Text, lesson
from vision_attn.lessons.wording import Say

LENGTHS = (64, 256, 1024)
DIM, HEADS = 32, 2
WAYS: dict[str, dict[str, Any]] = {
    "full": {"kernel": "explicit"},
    "linformer": {"pattern": "linformer", "rank": 16, "kernel": "explicit"},
    "performer": {"pattern": "performer", "features": 32},
}


def draw_cost(numbers: Numbers, path: Path, say: Say) -> None:
    with figure(path, (5, 3)) as (_, axes):
        for (name, macs), color in zip(numbers["macs"].items(), COLORS, strict=False):
            axes[0][0].plot(LENGTHS, macs, "o-", color=color, label=name)
        axes[0][0].set(xscale="log", yscale="log", xlabel=say("tokens N", "token 数 N"))
        axes[0][0].set(ylabel=say("multiply-accumulates, without projections", "乘加次数（不含投影）"))
        axes[0][0].legend()


@lesson(
    "cost",
    proofs=("22*", "28*", "35*", "36*", "37"),
    draw=draw_cost,
    en=Text(
        "What attention costs, and how to pay less",
        """
Every query meets every key: four times the tokens, sixteen times the work. Multiply-accumulates of one layer of width 32, its projections left out, counted:
  tokens                    {lengths[0]:>10} {lengths[1]:>10} {lengths[2]:>10}   per 4 × tokens
  full                      {full[0]:10,} {full[1]:10,} {full[2]:10,}      × {growth[full]:.1f}
  window, radius 8          {window[0]:10,} {window[1]:10,} {window[2]:10,}      × {growth[window]:.1f}
  Linformer, rank 16        {linformer[0]:10,} {linformer[1]:10,} {linformer[2]:10,}      × {growth[linformer]:.1f}
  Performer, 32 features    {performer[0]:10,} {performer[1]:10,} {performer[2]:10,}      × {growth[performer]:.1f}
A window is exact for the pairs it keeps. Linformer and Performer approximate all of them; neither ever has a weight per pair of tokens, so their attention maps are implied ones, and `vision-attn maps` labels them so.
Memory is another matter. Written out, the weights of {lengths[2]:,} tokens take {memory:.0f} MiB for these {heads} heads; FlashAttention keeps a tile of them at a time and never the whole, for the same result (our readable form of it differs by {tiled:.0e}). The work stays quadratic.
""",
        "{attentions} promises FlashAttention a speed-up of 2 to 4 times. That holds for some machines, lengths and precisions and not for others: `vision-attn benchmark attention` measures yours.",
    ),
    zh=Text(
        "注意力的代价，以及怎样省下来",
        """
每个查询都要见到每个键：token 变成四倍，计算量就变成十六倍。宽度为 32 的一层（不计投影）实际计数的乘加次数：
  token 数                  {lengths[0]:>10} {lengths[1]:>10} {lengths[2]:>10}   token × 4 时
  全局                      {full[0]:10,} {full[1]:10,} {full[2]:10,}      × {growth[full]:.1f}
  窗口，半径 8              {window[0]:10,} {window[1]:10,} {window[2]:10,}      × {growth[window]:.1f}
  Linformer，秩 16          {linformer[0]:10,} {linformer[1]:10,} {linformer[2]:10,}      × {growth[linformer]:.1f}
  Performer，32 个特征      {performer[0]:10,} {performer[1]:10,} {performer[2]:10,}      × {growth[performer]:.1f}
窗口对它保留的配对是精确的。Linformer 和 Performer 近似所有配对，但从来没有逐对的权重，所以它们的注意力图是反推出来的，`vision-attn maps` 会这样标明。
内存是另一回事。把 {lengths[2]:,} 个 token 的权重全部写出来，{heads} 个头就要 {memory:.0f} MiB；FlashAttention 每次只保留一小块，从不保存整张表，结果却相同（我们的易读实现相差 {tiled:.0e}）。计算量仍然是平方级。
""",
        "{attentions}说 FlashAttention 有 2–4 倍加速。这取决于机器、长度和精度，并非处处成立：请用 `vision-attn benchmark attention` 在自己的机器上测量。",
    ),
)
def cost() -> Numbers:
    macs: dict[str, list[int]] = {name: [] for name in ("full", "window", "linformer", "performer")}
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        for n in LENGTHS:
            x = torch.randn(1, n, DIM)
            # counted by pairs: the kernel that skips the others is one that PyTorch's counter does not look into
            macs["window"].append(2 * DIM * int(Window(8).mask(n, Layout()).sum()))
            for name, words in WAYS.items():
                layer = Attention(DIM, HEADS, layout=Layout(0, (n, 1)), **words).eval()
                with FlopCounterMode(display=False) as counter:
                    layer(x)
                macs[name].append(counter.get_total_flops() // 2 - 4 * n * DIM * DIM)
        q, k, v = (torch.randn(1, HEADS, 256, 16) for _ in range(3))
        tiled = (attend(q, k, v, kernel="tiled") - attend(q, k, v, kernel="explicit")).abs().max()
    return {
        "macs": macs,
        **macs,
        "growth": {name: found[-1] / found[-2] for name, found in macs.items()},
        "lengths": LENGTHS,
        "memory": HEADS * LENGTHS[-1] ** 2 * 4 / 2**20,
        "heads": HEADS,
        "tiled": float(tiled),
    }


def draw_pointer(numbers: Numbers, path: Path, say: Say) -> None:
    with figure(path, (4.6, 3)) as (_, axes):
        axis = axes[0][0]
        axis.imshow(numbers["rows"], cmap="Blues", vmin=0, vmax=1.2)
        for row, line in enumerate(numbers["rows"]):
            for column, value in enumerate(line):
                axis.text(
                    column,
                    row,
                    f"{value:.2f}",
                    ha="center",
                    va="center",
                    color="white" if value > 0.6 else "black",
                    fontsize=7.5,
                )
        axis.set_xticks(range(len(numbers["inputs"])), numbers["inputs"])
        axis.set(xlabel=say("inputs", "输入"), ylabel=say("step", "步"), yticks=range(len(numbers["rows"])))
        axis.set_title(say("where each step points", "每一步指向哪里"))


@lesson(
    "pointer",
    proofs=("16*",),
    draw=draw_pointer,
    en=Text(
        "Pointing: the weights are the answer",
        """
A pointer network takes n things and answers with places from 1 to n. It mixes nothing: the row of weights itself is the answer, so the answer can be as long as the input, whatever its length.
Here a fixed query asks “which is largest?” of {inputs}, and what was pointed at is masked in the next step:
{table}
It has sorted them: {order}. A trained pointer network learns the query and the scores from examples; recipes/ has one that sorts images of real digits.
""",
    ),
    zh=Text(
        "指针：权重就是答案",
        """
指针网络接收 n 样东西，回答 1 到 n 之间的位置。它什么也不混合：一行权重本身就是答案，所以无论输入多长，答案都能与之相应。
这里用一个固定的查询对 {inputs} 提问：“哪个最大？”，指过的在下一步遮住：
{table}
这样就排好了序：{order}。真正的指针网络从例子中学习查询和打分；recipes/ 里有一个能给真实手写数字图像排序的例子。
""",
    ),
)
def pointer() -> Numbers:
    inputs = [3, 8, 1, 6]
    keys, query = torch.tensor(inputs, dtype=torch.float32)[None, None, :, None], torch.ones(1, 1, 1, 1)
    free, rows, order = torch.ones(1, 4, dtype=torch.bool), [], []
    for _ in inputs:
        row = attention_weights(query, keys, score="dot", mask=free)[0, 0, 0]
        rows.append(row.tolist())
        order.append(int(row.argmax()))
        free = free.clone()
        free[0, order[-1]] = False
    lines = (
        f"  {i + 1}.  " + "  ".join(f"{w:.3f}" for w in row) + f"   → {at + 1}"
        for i, (row, at) in enumerate(zip(rows, order, strict=True))
    )
    return {
        "inputs": inputs,
        "rows": rows,
        "table": "\n".join(lines),
        "order": ", ".join(str(inputs[at]) for at in order),
        "places": order,
    }
