# SPDX-License-Identifier: Apache-2.0
"""What the training scripts share."""
