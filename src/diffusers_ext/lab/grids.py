# SPDX-License-Identifier: Apache-2.0
"""Pictures side by side, with captions."""

import numpy as np
from PIL import Image, ImageDraw, ImageFont


def image_grid(images, columns, row_labels=None, column_labels=None, title=None, scale=1):
    """
    Arranges pictures of one size in rows, with captions at the left and on top.

    Args:
        images (`list[PIL.Image.Image]` or `np.ndarray` of shape `(N, height, width, 3)`):
            Pictures, row by row; `None` leaves a place empty.
        columns (`int`):
            Pictures per row.
        row_labels, column_labels (`list[str]`, *optional*):
            Captions; `\\n` breaks the line.
        title (`str`, *optional*):
            A line above everything.
        scale (`int`, *optional*, defaults to 1):
            How many times larger the pictures are drawn, without smoothing.

    Returns:
        `PIL.Image.Image`

    Raises:
        ValueError: on no picture, pictures of different sizes, or a wrong number of labels.
    """
    pictures = [
        image if image is None or isinstance(image, Image.Image) else Image.fromarray(np.asarray(image))
        for image in images
    ]
    sizes = {picture.size for picture in pictures if picture is not None}
    if len(sizes) != 1 or columns < 1:
        raise ValueError(
            f"Expected pictures of one size and at least one column but got sizes {sorted(sizes)} and {columns} "
            "columns."
        )
    rows = -(-len(pictures) // columns)
    for labels, count, what in ((row_labels, rows, "row_labels"), (column_labels, columns, "column_labels")):
        if labels is not None and len(labels) != count:
            raise ValueError(f"`{what}` has to have {count} entries but has {len(labels)}.")
    width, height = (side * scale for side in next(iter(sizes)))
    gap, font = 4, ImageFont.load_default(size=13)
    measure = ImageDraw.Draw(Image.new("RGB", (1, 1)))

    def box(text):
        left, top, right, bottom = measure.multiline_textbbox((0, 0), text, font=font)
        return right - left, bottom - top

    left = max((box(label)[0] for label in row_labels), default=0) + 12 if row_labels else gap
    title_height = box(title)[1] + 14 if title else 0
    top = title_height + (max(box(label)[1] for label in column_labels) + 12 if column_labels else gap)
    # A column is as wide as its caption, the whole as its title: neither is cut off nor runs into its neighbour.
    cell = max([width, *(box(label)[0] for label in column_labels or ())])
    total = max(left + columns * (cell + gap), box(title)[0] + 2 * gap if title else 0)
    canvas = Image.new("RGB", (total, top + rows * (height + gap)), "white")
    draw = ImageDraw.Draw(canvas)
    if title:
        draw.text((gap, 6), title, fill="black", font=font)
    for c, label in enumerate(column_labels or ()):
        x = left + c * (cell + gap) + cell // 2
        draw.multiline_text((x, top - 6), label, fill="black", font=font, anchor="md", align="center")
    for r, label in enumerate(row_labels or ()):
        y = top + r * (height + gap) + height // 2
        draw.multiline_text((6, y), label, fill="black", font=font, anchor="lm")
    for i, picture in enumerate(pictures):
        if picture is not None:
            x, y = left + i % columns * (cell + gap) + (cell - width) // 2, top + i // columns * (height + gap)
            canvas.paste(picture.convert("RGB").resize((width, height), Image.Resampling.NEAREST), (x, y))
    return canvas
