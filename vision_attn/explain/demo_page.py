"""The demo's page, by Gradio: a picture, a model, and a CNN beside it. ``scripts/demo`` starts it."""

from __future__ import annotations

import argparse
import logging
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vision_attn.errors import UserError
from vision_attn.explain import demo
from vision_attn.explain.faithfulness import CAUSES

HOST = "127.0.0.1"  # nobody else on the network can reach it
NONE = "nothing beside it"
NOTHING = "nothing found"
INTRO = f"""# What does a model look at?
Drop a picture and choose a model. Its attention can be seen by layer, head and query (click the picture to choose a
query), and a CNN stands beside it. {CAUSES}"""
# what a map is worth stands at the end of its title, which is to be read whole
CSS = ".caption-label { white-space: normal !important; max-width: 100% !important; }"
EMPTY = "Drop a picture, then press “Look”."

_log = logging.getLogger(__name__)


def import_gradio(folder: str | None = None) -> Any:
    """Gradio, with everything that would ask for the network switched off.

    Args:
        folder: for uploads and pictures; parts of a page remember the one that was set when they were made.

    Raises:
        UserError: it is not installed.
    """
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    os.environ["HF_HUB_OFFLINE"] = "1"
    if folder is not None:
        os.environ["GRADIO_TEMP_DIR"] = folder
    try:
        import gradio
    except ImportError as error:
        raise UserError('the demo needs Gradio: pip install "vision_attn[demo,explain]"') from error
    return gradio


class Page:
    """What happens on the page. Every answer is one that Gradio can show.

    Args:
        gradio: the package.
        sources: models to choose from.
    """

    def __init__(self, gradio: Any, sources: Sequence[demo.Source]) -> None:
        self.gr = gradio
        self.sources = {source.title: source for source in sources}

    def guarded(self, make: Any, count: int) -> Any:
        """What ``make`` gives with an empty message behind it; or nothing changed, and the message."""
        try:
            return (*make(), "")
        except (UserError, ValueError, OSError) as error:
            message = str(error)
        except Exception as error:  # whatever a picture or checkpoint can do, the page lives on
            _log.exception("the demo failed")
            message = f"Something went wrong ({type(error).__name__}); the terminal says what."
        return (*([self.gr.skip()] * count), f"**{message}**")

    def look(self, file: str | None, model: str, beside: str, measure: bool) -> Any:
        """Everything about a picture: for state, answer, picture, choices, map, galleries, notes, message."""

        def make() -> tuple[Any, ...]:
            picture = demo.read_upload(file)
            name = Path(str(file)).name
            seen = demo.look_at(self.sources[model], picture, name, measure=measure)
            other = None if beside == NONE else demo.look_at(self.sources[beside], picture, name, measure=measure)
            layer = seen.titles[-1] if seen.titles else None
            pieces = (seen, seen.scores or NOTHING, demo.with_boxes(seen), *self.choices(seen, layer))
            answer = None if other is None else other.scores or NOTHING
            notes = [f"{seen.insight.name}: {note}" for note in seen.notes]
            notes += [f"{other.insight.name}: {note}" for note in other.notes] if other else []
            maps = (demo.gallery(seen), answer, demo.gallery(other) if other else [])
            return (*pieces, *maps, "\n\n".join(dict.fromkeys(notes)))

        return self.guarded(make, 11)

    def choices(self, seen: demo.Look, layer: str | None) -> tuple[Any, Any, Any, Any]:
        """Layers, and the heads and queries of one; and its map."""
        if layer is None:
            empty = self.gr.update(choices=[], value=None)
            return empty, empty, empty, None
        view = seen.layer(layer)
        heads = [demo.MEAN, *map(str, view.heads)]
        picked = (layer, demo.MEAN, view.labels[0])
        lists = (seen.titles, heads, view.labels)
        updates = [self.gr.update(choices=x, value=value) for x, value in zip(lists, picked, strict=True)]
        return updates[0], updates[1], updates[2], self.drawn(seen, *picked)

    def drawn(self, seen: demo.Look, layer: str | None, head: str | None, query: str | None) -> Any:
        """The map as a picture."""
        return demo.overlaid(seen.view.pixels, demo.map_of(seen, layer, head, query))

    def change_layer(self, seen: demo.Look | None, layer: str | None) -> Any:
        """Another layer: its heads, queries and map."""
        if seen is None or layer is None:
            return self.gr.skip(), self.gr.skip(), self.gr.skip(), nothing_to_choose(seen)
        return self.guarded(lambda: self.choices(seen, layer)[1:], 3)

    def change_map(self, seen: demo.Look | None, layer: str | None, head: str | None, query: str | None) -> Any:
        """Another head or query: the map."""
        if seen is None or layer is None:
            return self.gr.skip(), nothing_to_choose(seen)
        return self.guarded(lambda: (self.drawn(seen, layer, head, query),), 1)

    def click(self, seen: demo.Look | None, layer: str | None, at: Sequence[int]) -> Any:
        """A click on the picture: the query there."""
        if seen is None or layer is None:
            return self.gr.skip(), nothing_to_choose(seen)

        def make() -> tuple[Any, ...]:
            width, height = demo.with_boxes(seen).size
            query = demo.query_at(seen, layer, at[0] / width, at[1] / height)
            if query is None:
                raise UserError("The queries of this layer lie nowhere on the picture: choose one from the list.")
            return (query,)

        return self.guarded(make, 1)


def nothing_to_choose(seen: demo.Look | None) -> str:
    """Why there is no layer, head or query to choose."""
    if seen is None:
        return EMPTY
    return f"{seen.insight.name} has no attention, so no layers, heads or queries: see its maps below."


def build(sources: Sequence[demo.Source], folder: str | None = None) -> Any:
    """The page as ``gradio.Blocks``.

    Args:
        sources: models to choose from.
        folder: for uploads and pictures while it runs; a common one of the machine by default.

    Raises:
        UserError: Gradio is not installed.
    """
    gr = import_gradio(folder)
    page = Page(gr, sources)
    titles = list(page.sources)
    beside = [NONE, *[title for title, source in page.sources.items() if source.path or source.convolutional]]
    with gr.Blocks(title="vision_attn: what does a model look at?", delete_cache=(600, 600)) as blocks:
        gr.Markdown(INTRO)
        state = gr.State(None)
        with gr.Row():
            with gr.Column(scale=1, min_width=260):
                file = gr.File(label="picture", file_count="single", type="filepath", elem_id="upload")
                model = gr.Dropdown(titles, value=titles[0], label="model", elem_id="model")
                other = gr.Dropdown(beside, value=NONE, label="beside it", elem_id="beside")
                measure = gr.Checkbox(False, label=demo.MEASURE)
                go = gr.Button("Look", variant="primary", elem_id="look")
                message = gr.Markdown(EMPTY, elem_id="message")
            with gr.Column(scale=1, min_width=260):
                picture = gr.Image(label="as the model sees it", interactive=False, elem_id="picture", buttons=[])
                answer = gr.Label(label="answer", num_top_classes=5, elem_id="answer")
            with gr.Column(scale=1, min_width=260):
                shown = gr.Image(label="attention", interactive=False, elem_id="map", buttons=[])
                layer = gr.Dropdown([], label="layer", elem_id="layer")
                head = gr.Dropdown([], label="head", elem_id="head")
                query = gr.Dropdown([], label="query", elem_id="query")
        with gr.Row():
            with gr.Column():
                gr.Markdown("### Maps of the whole model")
                maps = gr.Gallery(
                    show_label=False, columns=3, height=400, object_fit="contain", elem_id="maps", buttons=[]
                )
            with gr.Column():
                gr.Markdown("### The model beside it")
                other_answer = gr.Label(label="its answer", num_top_classes=5, elem_id="other")
                other_maps = gr.Gallery(
                    show_label=False, columns=3, height=400, object_fit="contain", elem_id="other_maps", buttons=[]
                )
        notes = gr.Markdown(elem_id="notes")
        results = [state, answer, picture, layer, head, query, shown, maps, other_answer, other_maps, notes, message]
        go.click(page.look, [file, model, other, measure], results)
        layer.input(page.change_layer, [state, layer], [head, query, shown, message])
        for chosen in (head, query):
            chosen.change(page.change_map, [state, layer, head, query], [shown, message])

        def clicked(seen: Any, name: str | None, event: Any) -> Any:
            return page.click(seen, name, event.index)

        # Gradio reads the annotation to know that an event is wanted; postponed ones it could not resolve here
        clicked.__annotations__["event"] = gr.SelectData
        picture.select(clicked, [state, layer], [query, message])
    return blocks


def launch(blocks: Any, *, port: int | None = None, block: bool = True) -> str:
    """Serves the page on this machine alone.

    Args:
        blocks: from ``build``.
        port: None for the first free one from 7860.
        block: stay until interrupted.

    Returns:
        Its address.
    """
    gr = import_gradio()
    # system fonts: the usual theme would ask a server for its own
    theme = gr.themes.Default(font=["system-ui", "sans-serif"], font_mono=["monospace"])
    blocks.queue(default_concurrency_limit=1, max_size=8)
    _, address, _ = blocks.launch(
        server_name=HOST,
        server_port=port,
        share=False,
        quiet=True,
        ssr_mode=False,
        theme=theme,
        css=CSS,
        footer_links=[],
        max_file_size=demo.MOST_BYTES,
        prevent_thread_lock=True,
    )
    print(f"Open {address} (Ctrl-C ends it)", flush=True)
    if block:
        blocks.block_thread()
    return str(address)


def main(argv: Sequence[str] | None = None) -> int:
    """``python -m vision_attn.explain.demo_page``; see ``scripts/demo``."""
    parser = argparse.ArgumentParser(prog="scripts/demo", description="A page that shows what models look at.")
    parser.add_argument("checkpoints", nargs="*", help=".ckpt, .safetensors, or the folder of a run or model")
    parser.add_argument("--runs", default="runs", help="folder of runs, whose best checkpoints are offered")
    parser.add_argument("--port", type=int, default=None, help="default: the first free one from 7860")
    options = parser.parse_args(argv)
    try:
        sources = demo.sources(options.checkpoints, options.runs)
        with tempfile.TemporaryDirectory(prefix="vision-attn-demo-") as folder:
            launch(build(sources, folder), port=options.port)
    except (UserError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
