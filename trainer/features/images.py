"""Images in a packed row: opened as the engine opens them, encoded once, in the places that turns store.

transformers puts images where their placeholder's id is found. A reply may contain a sampled placeholder, and some
models accept an image too many, so here an image stands in its stored places and nothing is searched for. The decoder
gets its embeddings through a hook: the rest of the forward pass is that of a row of text. Legend: N tokens of a row, R
sequences of it, H hidden size.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import io
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import cachetools
import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor

from trainer.batch.batch import Batch, Row
from trainer.batch.chain import Chain
from trainer.batch.forest import Indices, side_by_side
from trainer.model.inputs import RowInputs, flat_places, on_device
from trainer.model.model import Policy
from trainer.model.terms import Around, Term
from turnwise.engine_plugin.features.images import pixels_digest, processor_digest
from turnwise.errors import BatchRefused
from turnwise.features.images import PlacedImage, images_of

Pixels = Mapping[str, Tensor]
"""What the model's processor makes of one image: arguments of `get_image_features`."""
PIXEL_BYTES = 1 << 30
"""Processed images that are kept between rows."""
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "AVIF")
BACKENDS = ("torchvision", "pil")
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 1e-2}
"""Mean |ours − the model's own forward pass| of a token, in nats, up to which both are the same in a precision."""
SIZES_DIM = 2
"""Dimensions of a tensor of sizes, such as the numbers of an image's patches; masks of pixels have more."""
AROUND = 8
"""Tokens before and behind an image that are compared; more of a long text would hide what differs at the image."""


class Unseen(Exception):
    """An image is not what the engine saw."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RowImages:
    """The distinct images of a row, with F features in all, and the P places of the row that get one."""

    pixels: Sequence[Pixels]
    places: Tensor
    """In the row's sequences, one behind the other; ascending. [P]"""
    source: Tensor
    """Which feature each place gets. [P]"""


Pictured = Sequence[tuple[Indices, Sequence[PlacedImage]]]
"""Of a row: the places of each chain that has images in it, with these."""


class Images(Term):
    """The images of chains, in the places that their turns store."""

    name = "images"

    def of_row(self, batch: Batch, row: Row) -> Pictured | None:
        found = []
        for member, own in row.paths:
            images = images_of(batch.experiences[member])
            if inside := [image for image in images if image.offset + image.length <= len(own)]:
                found.append((own, inside))
        return found or None

    def around(self, policy: Policy) -> Around:
        can_see = policy.place.is_whole and hasattr(policy.base, "get_image_features")
        return Vision(policy) if can_see else Blind(policy.settings.model)


class Blind(Around):
    """A model that sees no image, or that several processes compute."""

    def __init__(self, source: str) -> None:
        self._why = f"{source!r} sees none: train the model that was served, in one process"

    def why_unfit(self, chain: Chain) -> str | None:
        return f"media_model: {self._why}" if images_of(chain) else None

    def of_inputs(self, row: Row, inputs: RowInputs) -> RowInputs:
        if Images.name in row.parts:
            raise BatchRefused(f"a row has images, and {self._why}")
        return inputs


class Vision(Around):
    """The part of a model that sees, and the processor of its pixels."""

    def __init__(self, policy: Policy) -> None:
        model: Any = policy.base
        self._autocast = policy.autocast
        self._logprobs = policy.plain_logprobs
        self._model = model
        self._source = policy.settings.model
        self._device = policy.device
        self._arguments = inspect.signature(model.get_image_features).parameters
        self._rope: Any = getattr(model.base_model, "get_rope_index", None)
        """Positions of models whose tokens of an image have three; None for models that count tokens."""
        self._processors: dict[str, Any] = {}
        self._pixels_of: cachetools.LRUCache[tuple[str, ...], Pixels] = cachetools.LRUCache(PIXEL_BYTES, _num_bytes)
        self._num_features: dict[tuple[object, ...], int] = {}
        self._why_other: str | None = "not measured"

    def why_unfit(self, chain: Chain) -> str | None:
        """Return why the images of a chain cannot be computed as the engine saw them; None where they can."""
        if not images_of(chain):
            return None
        try:
            for image in images_of(chain):
                self._pixels(image)
        except Unseen as error:
            return f"media_processor: image {image.digest[:12]} is not what the engine saw: {error}"
        if self._why_other == "not measured":
            self._why_other = self._measured(chain)
        return self._why_other

    def of_inputs(self, row: Row, inputs: RowInputs) -> RowInputs:
        """Return a row's inputs with its images; may be called in a thread while another row is computed.

        Raises:
            BatchRefused: An image is not what the engine saw, of a chain that `why_unfit` was not asked about.
        """
        pictured: Pictured = row.parts.get(Images.name, ())
        if not pictured:
            return inputs
        flat = flat_places(row.layout, inputs.tokens.shape)
        numbers: dict[tuple[str, ...], int] = {}
        every: list[Pixels] = []
        starts, places, sources = [0], list[Indices](), list[Indices]()
        try:
            for path, image in ((path, image) for path, images in pictured for image in images):
                number = numbers.setdefault(_key(image), len(every))
                if number == len(every):
                    every.append(self._pixels(image))
                    starts.append(starts[-1] + self._count(every[-1]))
                places.append(flat[path[_embedded(image)]])
                sources.append(np.arange(starts[number], starts[number + 1]))
        except Unseen as error:
            raise BatchRefused(f"an image is not what the engine saw: {error}") from error
        # Chains share the places of an image in their trunk.
        distinct, first = np.unique(np.concatenate(places), return_index=True)
        images = RowImages(
            pixels=[{name: on_device(value, self._device) for name, value in one.items()} for one in every],
            places=on_device(torch.from_numpy(distinct), self._device),
            source=on_device(torch.from_numpy(np.concatenate(sources)[first]), self._device),
        )
        return dataclasses.replace(
            inputs,
            positions=inputs.positions if self._rope is None else self._positions(row, inputs, flat),
            parts={**inputs.parts, Images.name: images},
        )

    def forward(self, inputs: RowInputs | None) -> AbstractContextManager[None]:
        images = None if inputs is None else inputs.parts.get(Images.name)
        return contextlib.nullcontext() if images is None else self._shown(images)

    @contextlib.contextmanager
    def _shown(self, images: RowImages) -> Iterator[None]:
        """Give the decoder the features of a row's images in the block."""
        found = [self._features(pixels) for pixels in images.pixels]
        features, *deep = (torch.cat(each)[images.source] for each in zip(*found, strict=True))

        def embed(_decoder: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            embedded_RNH: Tensor = named["inputs_embeds"]
            shape = embedded_RNH.shape
            whole = embedded_RNH.flatten(0, 1).index_copy(0, images.places, features.to(embedded_RNH.dtype))
            named["inputs_embeds"] = whole.view(shape)
            if deep:
                seen = torch.zeros(shape[0] * shape[1], dtype=torch.bool, device=whole.device)
                named["visual_pos_masks"] = seen.index_fill(0, images.places, value=True).view(shape[:2])
                named["deepstack_visual_embeds"] = deep
            return arguments, named

        hook = self._model.get_decoder().register_forward_pre_hook(embed, with_kwargs=True)
        try:
            yield
        finally:
            hook.remove()

    def _measured(self, chain: Chain) -> str | None:
        """Return by how much a text with one image differs from the model's own forward pass; None where it does not.

        So a model whose tokens of an image see one another, for example, is refused.
        """
        first, *others = images_of(chain)
        begin = max(0, first.offset - AROUND)
        stop = min([first.offset + first.length + AROUND, *(other.offset for other in others)])
        tokens = chain.tokens[begin:stop].astype(np.int64)
        first = dataclasses.replace(
            first, offset=first.offset - begin, runs=tuple((start - begin, length) for start, length in first.runs)
        )
        seen = np.isin(np.arange(len(tokens)), _embedded(first))
        tokens[(tokens == self._model.config.image_token_id) & ~seen] = 0  # a sampled placeholder
        layout, (path,) = side_by_side([tokens])
        row = Row(layout=layout, predictor=path[:-1], token=path[1:], parts={Images.name: [(path, (first,))]})
        kinds = torch.from_numpy(seen.astype(np.int64))[None]
        ids = torch.from_numpy(tokens)[None]
        text = {"input_ids": ids, "mm_token_type_ids": kinds, "token_type_ids": kinds}
        accepted = inspect.signature(self._model.forward).parameters
        given = {name: value for name, value in text.items() if name in accepted} | dict(self._pixels(first))
        try:
            ours = self._logprobs(row, torch.from_numpy(tokens[1:]))
            with torch.no_grad(), self._autocast():
                logits = self._model(**{name: value.to(self._device) for name, value in given.items()}).logits[0]
        except (RuntimeError, ValueError, TypeError, IndexError) as error:
            return f"media_model: {self._source!r} computes no image here ({str(error)[:200]})"
        own = logits[:-1].float().log_softmax(-1).gather(1, ids[0, 1:, None].to(self._device))[:, 0].cpu()
        gap, allowed = float((own - ours).abs().mean()), TOLERANCE.get(logits.dtype, 1e-2)
        if gap <= allowed:
            return None
        return f"media_model: {self._source!r} computes images in another way, which differs by {gap:.2g} nats a token"

    def _features(self, pixels: Pixels) -> list[Tensor]:
        """Return an image's embeddings, and for a model with a deep stack what each of its first layers adds."""
        found = self._model.get_image_features(**pixels, return_dict=True)
        return [_joined(each) for each in (found.pooler_output, *(getattr(found, "deepstack_features", None) or ()))]

    def _count(self, pixels: Pixels) -> int:
        """Return the number of an image's features, which is computed once for each shape."""
        shape = tuple(
            (name, value.shape if value.is_floating_point() or value.ndim > SIZES_DIM else value.numpy().tobytes())
            for name, value in pixels.items()
        )
        if shape not in self._num_features:
            with torch.no_grad(), self._autocast():
                found = self._features({name: value.to(self._device) for name, value in pixels.items()})
            self._num_features[shape] = len(found[0])
        return self._num_features[shape]

    def _positions(self, row: Row, inputs: RowInputs, flat: Indices) -> Tensor:
        """Return three positions of each token, which depend on its ancestors alone. [3, R, N]."""
        positions = torch.zeros(3, inputs.tokens.numel(), dtype=torch.long)
        positions[:, flat] = torch.from_numpy(row.layout.positions)
        for path, images in row.parts[Images.name]:
            kinds = torch.zeros(1, len(path), dtype=torch.long)
            for image in images:
                kinds[0, _embedded(image)] = 1
            grids = torch.cat([self._pixels(image)["image_grid_thw"] for image in images])
            tokens = torch.from_numpy(row.layout.tokens[path].astype(np.int64))[None]
            found, _ = self._rope(tokens, mm_token_type_ids=kinds, image_grid_thw=grids)
            positions[:, flat[path]] = found[:, 0]
        return on_device(positions.view(3, *inputs.tokens.shape), self._device)

    def _pixels(self, image: PlacedImage) -> Pixels:
        """Return what the model's processor makes of an image; raise `Unseen` where it is not what the engine saw."""
        key = _key(image)
        if key in self._pixels_of:
            return self._pixels_of[key]
        if not image.content:
            raise Unseen("its file is deleted")
        try:
            pixels = self._processed(image)
        except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
            raise Unseen(f"it cannot be read: {error}") from error
        num_tokens, num_features = sum(length for _, length in image.runs), self._count(pixels)
        if num_tokens != num_features:
            raise Unseen(f"it has {num_tokens} tokens in its turn, and {num_features} features here")
        with contextlib.suppress(ValueError):  # it is larger than all that is kept
            self._pixels_of[key] = pixels
        return pixels

    def _processed(self, image: PlacedImage) -> Pixels:
        """Return an image's pixels by the processor that made those of the engine, whatever it was called there."""
        known = self._known_processors()
        picture, dtype = opened(image.content), image.pixels.partition(":")[0]
        for processor in [known[image.processor]] if image.processor in known else known.values():
            made = processor([picture], return_tensors="pt")
            values = made["pixel_values"]
            if dtype == "uint8":  # the engine scales and normalises on its device
                plain = processor([picture], return_tensors="pt", do_rescale=False, do_normalize=False)
                values = plain["pixel_values"]
            is_same = image.processor in known or not image.processor
            if image.pixels:
                is_same = pixels_digest(values.to(getattr(torch, dtype))) == image.pixels
            if is_same:
                return {name: value for name, value in made.items() if name in self._arguments}
        raise Unseen(
            f"its processor is none of {', '.join(type(one).__name__ for one in known.values())} with the settings "
            f"of {self._source!r}: train the model that was served, with the engine's transformers, and with "
            "torchvision if it has it"
        )

    def _known_processors(self) -> dict[str, Any]:
        """Return the model's image processors by their digest: one for each backend that is installed here."""
        from transformers import AutoImageProcessor

        for backend in () if self._processors else BACKENDS:
            processor = AutoImageProcessor.from_pretrained(self._source, backend=backend)
            self._processors.setdefault(processor_digest(processor), processor)
        return self._processors


def opened(content: bytes) -> Image.Image:
    """Return an image as vLLM opens it: upright, and white where it is transparent."""
    image: Image.Image = Image.open(io.BytesIO(content), formats=FORMATS)
    with contextlib.suppress(Exception):  # vLLM ignores a broken note of the orientation
        image = ImageOps.exif_transpose(image)
    image.load()
    if image.mode == "RGB":
        return image
    if image.mode not in ("RGBA", "LA", "PA") and "transparency" not in image.info:
        return image.convert("RGB")
    whole = image.convert("RGBA")
    white = Image.new("RGB", image.size, (255, 255, 255))
    white.paste(whole, mask=whole.getchannel("A"))
    return white


def _key(image: PlacedImage) -> tuple[str, ...]:
    return image.digest, image.processor, image.pixels


def _embedded(image: PlacedImage) -> Indices:
    """Return the places of an image's features in its chain; the rest of its range marks borders and rows."""
    return np.concatenate([np.arange(start, start + length) for start, length in image.runs])


def _joined(features: Any) -> Tensor:
    return features.flatten(0, -2) if isinstance(features, Tensor) else torch.cat(list(features))


def _num_bytes(pixels: Pixels) -> int:
    return sum(value.nbytes for value in pixels.values())
