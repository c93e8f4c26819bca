"""Detection transformers (Carion et al. 2020, arXiv 2005.12872), and what makes them learn sooner.

How a detector hangs together:

* ``models.backbones`` makes a map of the images; ``layers.padding`` keeps their padding out of it.
* ``layers.encoder`` over its tokens, whose places are ``layers.sine``'s waves, gives the memory.
* Queries are learned (``models.detr_parts``) or the memory's best tokens (``layers.query_selection``); in training
  disturbed objects go before them (``detection.denoising``).
* ``layers.box_decoder`` asks the memory, ``layers.box_bias`` beside its scores; every layer gives classes and boxes.
* In training ``detection.criterion`` matches them (``matcher``) and adds up ``losses``; in evaluation
  ``detection.postprocess`` makes detections of the last layer's, and ``coco_eval`` scores them.

Legend: B images, N queries, M image tokens, D width, L decoder layers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from vision_attn.attention import AttentionConfig, Layout, padding_mask
from vision_attn.attention.positions import LAYER_POSITIONS
from vision_attn.detection.denoising import Denoising, make_denoising
from vision_attn.errors import UserError
from vision_attn.layers.box_decoder import MLP, BoxDecoder, Memory, Queries, at_least_float32
from vision_attn.layers.embed import pair
from vision_attn.layers.encoder import EncoderLayer
from vision_attn.layers.padding import apart, pad_together, unpadded
from vision_attn.layers.query_selection import QuerySelection
from vision_attn.layers.sine import grid_waves
from vision_attn.models.backbones import make_backbone, preprocessing, with_norm
from vision_attn.models.detr_parts import ObjectQueries, init_heads, init_transformer, mechanisms, with_denoising

Targets = Sequence[Mapping[str, Tensor]]


class DETR(nn.Module):
    """Images → features → encoder → object queries → classes and boxes.

    ``model(images, mask=None, targets=None)`` takes images (B, C, H, W) with a mask (B, H, W), True = image, or a list
    of images (C, h, w) of any sizes. It gives a dictionary: ``pred_logits`` (B, N, num_classes + 1) for softmax, the
    last for no object, or (B, N, num_classes) for sigmoid; ``pred_boxes`` (B, N, 4), centre x, y, width and height as
    shares of the image without its padding; ``aux_outputs``, the same of every earlier decoder layer. In training also
    ``groups``, ``dn`` and ``enc_outputs``, where there are query groups, denoising and query selection.

    Args:
        num_classes: of objects. The original has 91: COCO's largest category id and one.
        img_size: pixels the model is described at; it takes any size.
        in_chans: channels of the images.
        backbone, backbone_options, backbone_weights: see ``make_backbone``.
        embed_dim, num_heads, enc_layers, dec_layers, mlp_ratio: width D, heads, layers, hidden width of MLPs over D.
        dec_heads, dec_mlp_ratio: of the decoder, where they are others.
        num_queries: N.
        queries: ``learned`` positions; ``point``: and a point that follows from them; ``box``: learned boxes (DAB-DETR:
            Liu et al. 2022, arXiv 2201.12329).
        refine: each decoder layer moves the boxes on from those of the one before; of ``box`` queries.
        conditional, modulate, box_bias: how positions meet in cross-attention, see ``BoxDecoder``.
        query_selection: the boxes of queries come from the encoder; see ``QuerySelection``.
        query_groups: in training, so many sets of queries that do not see each other, each matched by itself (Group
            DETR: Chen et al. 2022, arXiv 2207.13085).
        dn_groups, dn_contrastive, dn_label_noise, dn_box_noise, dn_most: denoising queries in training, see
            ``make_denoising``; 0 groups for none.
        classification: ``softmax`` with a class for no object, or ``sigmoid``, every class by itself.
        temperature: of the position waves of tokens and boxes.
        centred: positions are the middles of tokens, as boxes mean them; the original has their far ends.
        exact_padding: in evaluation the backbone sees each image without its padding, so that predictions do not depend
            on what else is in the batch. The original pads first. A list of images is always taken apart.
        pre_norm: normalize before each part of a layer, not after.
        dropout: of attention weights and after every projection.
        act, norm_eps: activation of the MLPs, ε of the layer norms.
        attention: mechanisms, see ``AttentionConfig``: of the encoder, and, but for pattern and position, the decoder.
        decoder_attention, cross_attention: those of the decoder's two attentions instead.

    Raises:
        UserError: options that make no sense together.
        ValueError: mechanisms that do not go together.
    """

    head_names = ("class_embed", "label_embed", "selection.class_embed")  # replaced for another number of classes
    output_names = ("class_embed", "bbox_embed", "selection.class_embed", "selection.bbox_embed")  # not for Muon
    not_in_config = ("backbone_weights",)  # a saved model has its own weights

    def __init__(
        self,
        *,
        num_classes: int = 91,
        img_size: int | tuple[int, int] = (480, 640),
        in_chans: int = 3,
        backbone: str = "resnet50",
        backbone_options: Mapping[str, Any] | None = None,
        backbone_weights: bool | str | None = None,
        embed_dim: int = 256,
        num_heads: int = 8,
        enc_layers: int = 6,
        dec_layers: int = 6,
        mlp_ratio: float = 8.0,
        dec_heads: int | None = None,
        dec_mlp_ratio: float | None = None,
        num_queries: int = 100,
        queries: str = "learned",
        refine: bool = False,
        conditional: bool = False,
        modulate: bool = False,
        box_bias: bool = False,
        query_selection: bool = False,
        query_groups: int = 1,
        dn_groups: int = 0,
        dn_contrastive: bool = False,
        dn_label_noise: float = 0.2,
        dn_box_noise: float = 0.4,
        dn_most: int | None = None,
        classification: str = "softmax",
        temperature: float = 10000.0,
        centred: bool = False,
        exact_padding: bool = True,
        pre_norm: bool = False,
        dropout: float = 0.1,
        act: str = "relu",
        norm_eps: float = 1e-5,
        attention: Mapping[str, Any] | AttentionConfig | None = None,
        decoder_attention: Mapping[str, Any] | None = None,
        cross_attention: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        if classification not in ("softmax", "sigmoid"):
            raise UserError(f"classification={classification!r}: choose softmax or sigmoid")
        if queries not in ("learned", "point", "box"):
            raise UserError(f"queries={queries!r}: choose learned, point or box")
        if queries != "box" and (query_selection or dn_groups):
            raise UserError("query_selection and dn_groups give queries a box to begin with: set queries='box'")
        if min(num_queries, query_groups, dec_layers) < 1:
            raise UserError("num_queries, query_groups and dec_layers must be 1 or more")
        self.img_size, self.num_classes, self.num_queries = pair(img_size), num_classes, num_queries
        self.classification, self.exact_padding = classification, exact_padding
        self.temperature, self.centred, self.query_groups = temperature, centred, query_groups
        self.denoising: dict[str, Any] = {
            "groups": dn_groups,
            "contrastive": dn_contrastive,
            "label_noise": dn_label_noise,
            "box_noise": dn_box_noise,
            "most": dn_most,
        }
        self.backbone: Any = make_backbone(
            backbone, in_chans=in_chans, img_size=self.img_size, weights=backbone_weights, options=backbone_options
        )
        if backbone_weights:  # which are not saved, but their norm is
            self.config_args = {"backbone_options": with_norm(backbone, backbone_weights, backbone_options)}
        self.preprocess = preprocessing(backbone, in_chans)
        self.input_proj = nn.Conv2d(self.backbone.channels, embed_dim, 1)
        config = AttentionConfig.of(attention)
        encoder, own, cross = mechanisms(config, decoder_attention, cross_attention, dropout)
        rows, columns = (-(-side // self.backbone.stride) for side in self.img_size)
        self.adds_position = config.position not in (*LAYER_POSITIONS, "none")
        layer: dict[str, Any] = {
            "mlp_ratio": mlp_ratio,
            "pre_norm": pre_norm,
            "dropout": dropout,
            "act": act,
            "norm_eps": norm_eps,
        }
        self.encoder = nn.ModuleList(
            EncoderLayer(embed_dim, num_heads, attention={"layout": Layout(0, (rows, columns)), **encoder}, **layer)
            for _ in range(enc_layers)
        )
        self.encoder_norm = nn.LayerNorm(embed_dim, eps=norm_eps) if pre_norm else nn.Identity()
        self.queries = ObjectQueries(num_queries * query_groups, embed_dim, queries, anchors=not query_selection)
        self.decoder = BoxDecoder(
            embed_dim,
            dec_heads or num_heads,
            dec_layers,
            reference="none" if queries == "learned" else queries,
            refine=refine,
            conditional=conditional,
            modulate=modulate,
            box_bias=box_bias,
            temperature=temperature,
            attention=own,
            cross_attention=cross,
            **{**layer, "mlp_ratio": dec_mlp_ratio or mlp_ratio},
        )
        num_logits = num_classes + (classification == "softmax")
        self.class_embed = nn.Linear(embed_dim, num_logits)
        self.bbox_embed = MLP(embed_dim, embed_dim, 4, 3, autocast=False)
        self.label_embed = nn.Embedding(num_classes, embed_dim) if dn_groups else None
        self.selection = QuerySelection(embed_dim, num_logits) if query_selection else None
        init_transformer(self)
        init_heads(self)

    def no_weight_decay(self) -> set[str]:
        """Parameters that weight decay must leave alone."""
        return {"queries.content", "queries.position", "queries.anchors", "label_embed.weight"}

    def forward(
        self, images: Tensor | Sequence[Tensor], mask: Tensor | None = None, targets: Targets | None = None
    ) -> dict[str, Any]:
        """(B, C, H, W) and (B, H, W), or a list of (C, h, w) → ``pred_logits``, ``pred_boxes`` and the rest.

        Args:
            images: normalized.
            mask: True = image; None where nothing is padded. Not for a list.
            targets: of each image ``labels`` (n,) and ``boxes`` (n, 4), for denoising in training. Evaluation does not
                look at them.

        Raises:
            UserError: no images, or a list with a mask. Labels beyond the classes are left to the criterion, which
                need not wait for the device to see them.
        """
        memory = self.encode(*self.features(images, mask))
        queries, denoising, selected = self._queries(memory, targets)
        found, boxes = self.decoder(queries, memory, self.bbox_embed)
        logits, boxes = at_least_float32(self.class_embed(found)), boxes.sigmoid()
        outputs: dict[str, Any] = {}
        if denoising is not None:
            m = denoising.labels.shape[1]
            outputs["dn"] = {"pred_logits": logits[:, :, :m], "pred_boxes": boxes[:, :, :m], "known": denoising}
            logits, boxes = logits[:, :, m:], boxes[:, :, m:]
        if selected is not None and self.training:
            outputs["enc_outputs"] = selected
        if self.training and self.query_groups > 1:
            outputs["groups"] = self.query_groups
        layers = [{"pred_logits": a, "pred_boxes": b} for a, b in zip(logits, boxes, strict=True)]
        return {**layers[-1], "aux_outputs": layers[:-1], **outputs}

    def features(self, images: Tensor | Sequence[Tensor], mask: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """The map of the backbone (B, C, h, w), and where there are images in it (B, h, w), None for everywhere."""
        if not isinstance(images, Tensor):
            if mask is not None or not len(images):
                raise UserError("a list of images is not empty, and has no mask: their sizes say where they end")
            if not self.training:
                return apart(self.backbone, images)
            images, mask = pad_together(images)
        if mask is None:
            return self.backbone(images), None
        if mask.shape != (images.shape[0], *images.shape[-2:]):
            raise UserError(f"mask {tuple(mask.shape)} is not (B, H, W) of images {tuple(images.shape)}")
        mask = mask.bool()
        if self.exact_padding and not self.training:
            single = unpadded(images, mask)
            if single is not None:
                return apart(self.backbone, single)
        found = self.backbone(images)
        return found, F.interpolate(mask[None].float(), size=found.shape[-2:])[0].bool()

    def encode(self, found: Tensor, mask: Tensor | None) -> Memory:
        """The tokens of a map (B, C, h, w) after the encoder."""
        x = self.input_proj(found)
        grid = (x.shape[-2], x.shape[-1])
        keep = torch.ones(1, *grid, dtype=torch.bool, device=x.device) if mask is None else mask
        x = x.flatten(2).transpose(1, 2)
        dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        position = grid_waves(keep, x.shape[-1], temperature=self.temperature, centred=self.centred, dtype=dtype)
        position = position.to(self.input_proj.weight.dtype)  # a model in half precision takes no other
        hidden = None if mask is None else padding_mask(mask.flatten(1))
        layout = Layout(0, grid)
        for layer in self.encoder:
            x = layer(x, pos=position if self.adds_position else None, mask=hidden, layout=layout)
        return Memory(self.encoder_norm(x), position, keep, hidden)

    def _queries(
        self, memory: Memory, targets: Targets | None
    ) -> tuple[Queries, Denoising | None, dict[str, Tensor] | None]:
        """Learned queries, in training of all groups and behind denoising ones."""
        batch, groups = memory.tokens.shape[0], self.query_groups if self.training else 1
        queries, selected = self.queries(batch, groups * self.num_queries), None
        if self.selection is not None:
            reference, selected = self.selection(memory, self.num_queries, self.num_classes)
            queries.reference = reference.repeat(1, groups, 1)
        if groups > 1:
            group = torch.arange(groups * self.num_queries, device=memory.tokens.device) // self.num_queries
            queries.mask = group[:, None] == group
        denoising = None
        if self.training and self.label_embed is not None:
            denoising = self._make_denoising(targets, groups * self.num_queries)
            if denoising is None:  # every parameter has a gradient in every step, as several processes must agree
                queries.content = queries.content + 0.0 * self.label_embed.weight.sum()
            else:
                known = denoising.labels.clamp(0, self.num_classes - 1)  # the criterion refuses others
                queries = with_denoising(queries, denoising, self.label_embed(known))
        return queries, denoising, selected

    def _make_denoising(self, targets: Targets | None, num_queries: int) -> Denoising | None:
        if targets is None:
            return None
        return make_denoising(targets, num_classes=self.num_classes, num_queries=num_queries, **self.denoising)
