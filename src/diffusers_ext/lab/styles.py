# SPDX-License-Identifier: Apache-2.0
"""The eight styles of EmojiCanvas: functions from a drawing to the same drawing in another style.

A drawing is a float32 array of shape `(size, size, 3)` with values in [0, 1] on a white background; `size` is a
multiple of 16. Lengths scale with `size / 64`, so a style looks the same at 64, 128 or 256 pixels. Every function is
deterministic.
"""

import numpy as np
from scipy import ndimage


INK = np.array([0.10, 0.10, 0.14], np.float32)
CREAM = np.array([1.0, 0.93, 0.70], np.float32)
CRIMSON = np.array([0.55, 0.05, 0.15], np.float32)


def _scale(drawing):
    return drawing.shape[0] / 64


def _luminance(drawing):
    return drawing @ np.array([0.299, 0.587, 0.114], np.float32)


def _edges(drawing, sigma):
    """Edges of the strongest channel in [0, 1], shape `(size, size)`; `sigma` in pixels of a 64-pixel drawing."""
    # A Sobel response shrinks as the same edge is drawn with more pixels, hence the factor.
    scale, strength = _scale(drawing), 0
    for channel in range(3):
        smooth = ndimage.gaussian_filter(drawing[..., channel], sigma * scale)
        strength = np.maximum(strength, np.hypot(ndimage.sobel(smooth, 0), ndimage.sobel(smooth, 1)))
    return np.clip(strength * scale / 1.2, 0, 1)


def _over(base, colour, alpha):
    """`colour` laid over `base` with the opacity map `alpha` of shape `(size, size)`."""
    return base * (1 - alpha[..., None]) + colour * alpha[..., None]


def sticker(drawing):
    """The drawing as its set draws it."""
    return drawing


def ink(drawing):
    """Black outlines over a thin grey wash."""
    wash = 1 - 0.45 * (1 - _luminance(drawing))
    return _over(np.repeat(wash[..., None], 3, -1), INK, np.clip(_edges(drawing, 0.6) * 1.6, 0, 1))


def pixel(drawing):
    """Sixteen pixels a side with few shades a channel, as on an early home computer."""
    side = drawing.shape[0] // 16
    blocks = drawing.reshape(16, side, 16, side, 3).mean((1, 3))
    blocks = np.round(blocks * 5) / 5
    return np.repeat(np.repeat(blocks, side, 0), side, 1)


def blueprint(drawing):
    """White lines on blue squared paper, darker parts of the drawing faintly hatched in light blue."""
    size, grid = drawing.shape[0], np.zeros(drawing.shape[:2], np.float32)
    width = max(1, round(_scale(drawing)))
    for start in range(0, size, size // 8):
        grid[start : start + width] = 0.12
        grid[:, start : start + width] = 0.12
    paper = _over(np.array([0.10, 0.25, 0.60], np.float32), np.float32(1), grid)
    paper = _over(paper, np.array([0.45, 0.68, 0.95], np.float32), 0.75 * (1 - _luminance(drawing)))
    return _over(paper, np.array([0.95, 0.97, 1.0], np.float32), np.clip(_edges(drawing, 0.7) * 1.5, 0, 1))


def neon(drawing):
    """Glowing coloured outlines on a night sky."""
    scale, line = _scale(drawing), _edges(drawing, 0.6)
    drawn = np.abs(drawing - 1).max(-1, keepdims=True) > 0.06
    colour = ndimage.gaussian_filter(np.where(drawn, drawing, 0.0), (scale, scale, 0))
    colour = colour / (colour.max(-1, keepdims=True) + 0.15)
    glow = np.clip(ndimage.gaussian_filter(line, 2 * scale) * 1.1, 0, 1)
    light = np.clip(line * 1.5, 0, 1) + 0.55 * glow
    return np.clip(np.array([0.04, 0.02, 0.08], np.float32) + colour * light[..., None], 0, 1)


def watercolour(drawing):
    """Pale, bleeding pigment on warm paper."""
    size, scale, rng = drawing.shape[0], _scale(drawing), np.random.default_rng(0)

    def field(sigma):
        # Drawn at 64 pixels and enlarged, so that the paper has the same stains at every size.
        noise = ndimage.gaussian_filter(rng.standard_normal((64, 64)), sigma)
        return ndimage.zoom(noise, scale, order=1)

    shift_x, shift_y = field(3) * 9 * scale, field(3) * 9 * scale
    y, x = np.mgrid[:size, :size]
    soft = ndimage.gaussian_filter(drawing, (1.1 * scale, 1.1 * scale, 0))
    wet = [
        ndimage.map_coordinates(soft[..., c], [y + shift_y, x + shift_x], order=1, mode="nearest") for c in range(3)
    ]
    wet = np.stack(wet, -1)
    pigment = np.clip(1 + 1.35 * field(4)[..., None], 0.5, 1.5)
    wash = 1 - (1 - wet) * 0.62 * pigment - _edges(wet, 1)[..., None] * 0.18
    return np.clip(wash, 0, 1) * np.array([1, 0.985, 0.93], np.float32)


def mosaic(drawing):
    """Irregular tiles of one colour each, set in dark grout; the ground is tiled in pale blue."""
    size, rng, tiles = drawing.shape[0], np.random.default_rng(7), 15
    corners = np.stack(np.meshgrid(np.arange(tiles), np.arange(tiles)), -1).reshape(-1, 2) / tiles
    seeds = corners + rng.uniform(0, 1 / tiles, (tiles * tiles, 2))
    y, x = (np.mgrid[:size, :size] + 0.5) / size
    distance = (y[..., None] - seeds[:, 0]) ** 2 + (x[..., None] - seeds[:, 1]) ** 2
    nearest = np.sqrt(np.partition(distance, 1, axis=-1)[..., :2])
    cell, count = distance.argmin(-1), np.arange(tiles * tiles)
    grout = (nearest[..., 1] - nearest[..., 0]) < 0.010
    colour = np.stack([ndimage.mean(drawing[..., c], cell, count)[cell] for c in range(3)], -1)
    colour = np.where(colour.min(-1, keepdims=True) > 0.97, np.array([0.80, 0.87, 0.93], np.float32), colour)
    return np.where(grout[..., None], colour * 0.62, colour)


def halftone(drawing):
    """Printed dots of the drawing's own colours on cream paper, contours in crimson."""
    size, pitch = drawing.shape[0], drawing.shape[0] // 16
    y, x = np.mgrid[:size, :size]
    darkness = ndimage.uniform_filter(1 - _luminance(drawing), pitch)
    column = (x + 0.5 + (y // pitch % 2) * pitch / 2) % pitch / pitch - 0.5
    radius = np.hypot((y + 0.5) % pitch / pitch - 0.5, column)
    dots = (radius < 0.16 + 0.42 * np.sqrt(np.clip(darkness, 0, 1))) * (darkness > 0.02)
    dots = ndimage.gaussian_filter(dots.astype(np.float32), 0.4 * _scale(drawing))
    colour = ndimage.uniform_filter(drawing, (pitch, pitch, 1)) * 0.9
    return _over(_over(CREAM, colour, dots), CRIMSON, np.clip(_edges(drawing, 0.7) * 1.1, 0, 1))


STYLES = {style.__name__: style for style in (sticker, ink, pixel, blueprint, neon, watercolour, mosaic, halftone)}


def apply_style(drawing, style):
    """
    Draws `drawing` in one of the eight styles.

    Args:
        drawing (`np.ndarray` of shape `(size, size, 3)`):
            Values in [0, 1] (float) or [0, 255] (uint8), white background, `size` a multiple of 16.
        style (`str`):
            A key of `STYLES`.

    Returns:
        `np.ndarray`: uint8, same shape.

    Raises:
        ValueError: on an unknown style or a drawing of another shape.

    Example:

    ```py
    >>> import numpy as np
    >>> from diffusers_ext.lab.styles import apply_style

    >>> square = np.ones((64, 64, 3), np.float32)
    >>> square[16:48, 16:48] = (0.9, 0.2, 0.1)
    >>> apply_style(square, "neon").shape
    (64, 64, 3)
    ```
    """
    if style not in STYLES:
        raise ValueError(f"`style` has to be one of {sorted(STYLES)} but is {style!r}.")
    drawing = np.asarray(drawing)
    if drawing.ndim != 3 or drawing.shape[0] != drawing.shape[1] or drawing.shape[0] % 16 or drawing.shape[2] != 3:
        raise ValueError(f"`drawing` has to be square RGB with a side divisible by 16 but has shape {drawing.shape}.")
    if drawing.dtype == np.uint8:
        drawing = drawing / np.float32(255)
    return (np.clip(STYLES[style](drawing.astype(np.float32)), 0, 1) * 255).round().astype(np.uint8)
