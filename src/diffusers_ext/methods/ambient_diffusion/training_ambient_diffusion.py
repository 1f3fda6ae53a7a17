# SPDX-License-Identifier: Apache-2.0
"""Data for training with a small set: pictures that keep their ids, draws that survive a resume, baselines."""

import hashlib
import json
import logging
import random
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from .noise_ambient_diffusion import FixedNoise
from .report_ambient_diffusion import PICTURES


logger = logging.getLogger(__name__)

PERTURBATIONS = ("random_tokens", "add_tokens", "repeat_words", "several_captions")
# Keeps the fresh noise of a run apart from the fixed noise of its samples, whatever the seed.
_FRESH = 2**63


def ramped_learning_rate(learning_rate, images_seen, rampup_kimg=10_000):
    """The official learning rate: rises linearly over the first thousands of images."""
    return learning_rate * min(images_seen / (rampup_kimg * 1000), 1)


def ema_decay(batch_size, images_seen, halflife_kimg=500, rampup_ratio=0.05):
    """The official decay of the average of weights: a half-life in images that grows at the start."""
    halflife = min(halflife_kimg * 1000, images_seen * rampup_ratio)
    return 0.5 ** (batch_size / max(halflife, 1e-8))


class PictureDataset(torch.utils.data.Dataset):
    r"""
    Pictures that each have an id for good. Pictures that are equal pixel by pixel share one, since each further id is
    a further noisy view.

    Args:
        pictures (`list`):
            Paths, PIL pictures, or uint8 arrays `(height, width, 3)`.
        size (`int`):
            Side; pictures are resized by their shorter side and cropped in the middle.
        captions (`list`, *optional*):
            A text or a list of texts per picture.
        ids (`list[int]`, *optional*):
            By default the number of the first picture that is equal.
        random_flip (`bool`, *optional*, defaults to `False`):
            Whether half of the visits see the mirror picture.
        seed (`int`, *optional*, defaults to 0):
            Of the flips.

    Raises:
        ValueError: on no pictures, captions or ids that do not fit, or a picture that cannot be read.
    """

    def __init__(self, pictures, size, captions=None, ids=None, random_flip=False, seed=0):
        for name, values in (("captions", captions), ("ids", ids)):
            if values is not None and len(values) != len(pictures):
                raise ValueError(f"Expected one of `{name}` per picture but got {len(values)} for {len(pictures)}.")
        if not len(pictures):
            raise ValueError("The training set is empty.")
        self.pictures, self.size, self.random_flip, self.seed = pictures, size, random_flip, seed
        self.captions = None if captions is None else [[c] if isinstance(c, str) else list(c) for c in captions]
        digests = [self._digest(picture) for picture in pictures]
        first = {}
        for number, digest in enumerate(digests):
            first.setdefault(digest, number)
        repeated = len(pictures) - len(first)
        if ids is None:
            self.ids = [first[digest] for digest in digests]
            if repeated:
                logger.warning(f"{repeated} of {len(pictures)} pictures repeat another one and share its noise.")
        else:
            self.ids = [int(value) for value in ids]
            check_ids(self.ids, digests)
        self.fingerprint = hashlib.sha256(json.dumps([self.ids, digests]).encode()).hexdigest()[:16]

    @staticmethod
    def _digest(picture):
        if isinstance(picture, (str, Path)):
            return hashlib.sha256(Path(picture).read_bytes()).hexdigest()
        return hashlib.sha256(np.asarray(picture).tobytes()).hexdigest()

    def __len__(self):
        return len(self.pictures)

    def pixels(self, index):
        """A picture as `(3, size, size)` in [-1, 1], not flipped."""
        picture = self.pictures[index]
        try:
            image = Image.open(picture) if isinstance(picture, (str, Path)) else picture
            image = image if isinstance(image, Image.Image) else Image.fromarray(np.asarray(image))
            image = image.convert("RGB")
        except OSError as error:
            raise ValueError(f"{picture} cannot be read as a picture: {error}.") from error
        scale = self.size / min(image.size)
        if scale != 1:
            sides = [max(self.size, round(side * scale)) for side in image.size]
            image = image.resize(sides, Image.Resampling.LANCZOS)
        left, top = (image.width - self.size) // 2, (image.height - self.size) // 2
        image = image.crop((left, top, left + self.size, top + self.size))
        return torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 127.5 - 1

    def __getitem__(self, place):
        """`place` is `(index, position)`: the picture, and its place in the stream of all visits."""
        index, position = place
        flip = self.random_flip and random.Random(f"flip/{self.seed}/{position}").random() < 0.5
        pixels = self.pixels(index)
        item = {
            "pixel_values": pixels.flip(-1) if flip else pixels,
            "id": self.ids[index],
            "flipped": int(flip),
            "position": position,
        }
        return item if self.captions is None else {**item, "index": index}

    def all_pixels(self):
        """All pictures `(N, 3, size, size)` in [0, 1], for reports."""
        return torch.stack([self.pixels(index) for index in range(len(self))]).add(1).div(2).clamp(0, 1)


def check_ids(ids, digests):
    """
    Warns of ids that repeat: pictures that differ should not share their noise, nor copies have noise of their own.

    Args:
        ids (`list[int]`), digests (`list[str]`):
            One of each per picture; equal pictures have equal digests.
    """
    of_id, of_digest = {}, {}
    for sample_id, digest in zip(ids, digests):
        of_id.setdefault(sample_id, set()).add(digest)
        of_digest.setdefault(digest, set()).add(sample_id)
    shared = [sample_id for sample_id, found in of_id.items() if len(found) > 1]
    if shared:
        logger.warning(
            f"{len(shared)} ids repeat for pictures that differ (for instance {shared[0]}): they share noise."
        )
    split = [found for found in of_digest.values() if len(found) > 1]
    if split:
        logger.warning(
            f"{len(split)} pictures are there under several ids (for instance {sorted(split[0])}): each is a further "
            f"noisy view. Give copies one id."
        )


def read_image_folder(folder, caption_column="text", with_captions=True):
    """
    A folder of pictures, with captions from `metadata.jsonl`.

    Args:
        folder (`str` or `os.PathLike`):
            Has pictures, and with captions a `metadata.jsonl` whose rows have `file_name`, the caption column (a text
            or a list of texts) and optionally an integer `id`.
        caption_column (`str`, *optional*, defaults to `"text"`):
            Its name.
        with_captions (`bool`, *optional*, defaults to `True`):
            Whether captions are needed.

    Returns:
        `dict` of `pictures`, `captions` and `ids`; the latter two may be `None`.

    Raises:
        FileNotFoundError: when the folder, a picture or the file of captions is missing.
        ValueError: on a row that lacks something, or ids in some rows only.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is no folder.")
    metadata = folder / "metadata.jsonl"
    if not metadata.is_file():
        if with_captions:
            raise FileNotFoundError(f"{folder} has no metadata.jsonl; a text-conditional model needs captions.")
        pictures = sorted(path for path in folder.iterdir() if path.suffix.lower() in PICTURES)
        if not pictures:
            raise FileNotFoundError(f"{folder} holds no pictures ({', '.join(sorted(PICTURES))}).")
        return {"pictures": pictures, "captions": None, "ids": None}
    rows = []
    for number, line in enumerate(metadata.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{metadata}, line {number}: no valid JSON ({error}).") from error
        wanted = ["file_name", *([caption_column] if with_captions else [])]
        lacking = [name for name in wanted if not isinstance(row, dict) or not row.get(name)]
        if lacking:
            raise ValueError(f"{metadata}, line {number}: {', '.join(lacking)} is missing.")
        if not (folder / row["file_name"]).is_file():
            raise FileNotFoundError(f"{metadata}, line {number}: there is no picture {folder / row['file_name']}.")
        rows.append(row)
    with_id = sum("id" in row for row in rows)
    if with_id not in (0, len(rows)):
        raise ValueError(f"{metadata} gives an `id` in {with_id} of {len(rows)} rows; give all or none.")
    wrong = [row["id"] for row in rows if "id" in row and (type(row["id"]) is not int or row["id"] < 0)]
    if wrong:
        raise ValueError(f"{metadata}: `id` has to be a non-negative integer but is {wrong[0]!r}.")
    return {
        "pictures": [folder / row["file_name"] for row in rows],
        "captions": [row[caption_column] for row in rows] if with_captions else None,
        "ids": [row["id"] for row in rows] if with_id else None,
    }


class VisitSampler(torch.utils.data.Sampler):
    """
    Batches of `(index, position)` of one process, from an endless stream of shuffled passes over the data.

    What comes at a step depends on the seed and the step alone: resuming needs no state, and several processes take
    the parts of the batch that one process would have taken whole.

    Args:
        length (`int`): pictures in the data set.
        batch_size (`int`): of one process and forward pass.
        batches (`range`): numbers of the batches to give.
        seed (`int`): of the order.
        rank, world_size (`int`): which part of every batch is this process'.
    """

    def __init__(self, length, batch_size, batches, seed, rank=0, world_size=1):
        self.length, self.batch_size, self.batches, self.seed = length, batch_size, batches, seed
        self.rank, self.world_size = rank, world_size

    def __len__(self):
        return len(self.batches)

    def __iter__(self):
        orders = {}
        for batch in self.batches:
            start = (batch * self.world_size + self.rank) * self.batch_size
            places = []
            for position in range(start, start + self.batch_size):
                turn, place = divmod(position, self.length)
                if turn not in orders:
                    generator = np.random.Generator(np.random.Philox(key=[self.seed, turn]))
                    orders = {t: order for t, order in orders.items() if t == turn - 1}
                    orders[turn] = generator.permutation(self.length)
                places.append((int(orders[turn][place]), position))
            yield places


class VisitDraws:
    """
    Noise levels and fresh noise of a visit as functions of the seed and its position in the stream.

    Args:
        seed (`int`): of the run, below 2^63.
    """

    def __init__(self, seed):
        self._noise = FixedNoise(seed + _FRESH)

    def noise(self, positions, shape, stream=0):
        """Standard normal noise `(B, *shape)`; another stream gives other noise."""
        return self._noise(positions, shape, augmentation_keys=[stream] * len(positions))

    def normal(self, positions, stream=1):
        """A standard normal number per visit, `(B,)`."""
        return self.noise(positions, (1,), stream)[:, 0]

    def uniform(self, positions, stream=1):
        """A number in [0, 1) per visit, `(B,)`."""
        return torch.special.ndtr(self.normal(positions, stream).double()).clamp(0, 1 - 1e-9)


def perturb_caption(captions, tokenizer, kind, generator):
    """
    A caption as one of the baselines against copying changes it (Somepalli et al., 2023).

    Args:
        captions (`list[str]`):
            The captions of one picture; all but `"several_captions"` use the first.
        tokenizer (`transformers.CLIPTokenizer`):
            Of the model.
        kind (`str`):
            `"random_tokens"`: four random tokens instead; `"add_tokens"`: two random tokens at random places;
            `"repeat_words"`: two of its words again at random places; `"several_captions"`: one of the captions.
        generator (`random.Random`):
            Source of the choice.

    Returns:
        `list[int]`: token ids without begin and end.
    """

    def random_tokens(count):
        special = set(tokenizer.all_special_ids)
        found = []
        while len(found) < count:
            token = generator.randrange(len(tokenizer))
            if token not in special:
                found.append(token)
        return found

    def encode(text):
        return tokenizer(text, add_special_tokens=False).input_ids

    if kind not in PERTURBATIONS:
        raise ValueError(f"`kind` has to be one of {', '.join(PERTURBATIONS)} but is {kind!r}.")
    if kind == "random_tokens":
        return random_tokens(4)
    if kind == "several_captions":
        return encode(generator.choice(captions))
    if kind == "add_tokens":
        ids = encode(captions[0])
        for token in random_tokens(2):
            ids.insert(generator.randrange(len(ids) + 1), token)
        return ids
    words = captions[0].split()
    for word in [generator.choice(words) for _ in range(2)] if words else []:
        words.insert(generator.randrange(len(words) + 1), word)
    return encode(" ".join(words))


def pad_tokens(token_ids, tokenizer):
    """Token ids with begin, end and padding, cut to the model's length: `(B, length)`."""
    length = tokenizer.model_max_length
    rows = []
    for ids in token_ids:
        row = [tokenizer.bos_token_id, *ids[: length - 2], tokenizer.eos_token_id]
        rows.append(row + [tokenizer.pad_token_id] * (length - len(row)))
    return torch.tensor(rows)


def mix_embeddings(embeddings, share):
    """Each embedding `(B, length, width)` with its neighbour in the batch: `share * own + (1 - share) * other`."""
    share = share.view(-1, 1, 1).to(embeddings)
    return share * embeddings + (1 - share) * embeddings.roll(1, 0)
