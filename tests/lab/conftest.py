# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest


def _draw(size, radius=0.3):
    """A red disc with a blue bar across it, anti-aliased, the same picture at every size."""
    fine = 4 * size
    y, x = (np.mgrid[:fine, :fine] + 0.5) / fine
    picture = np.ones((fine, fine, 3), np.float32)
    picture[np.hypot(x - 0.5, y - 0.5) < radius] = (0.85, 0.15, 0.1)
    picture[(abs(y - 0.55) < 0.06) & (abs(x - 0.5) < 0.4)] = (0.1, 0.2, 0.7)
    return picture.reshape(size, 4, size, 4, 3).mean((1, 3))


@pytest.fixture
def draw():
    return _draw
