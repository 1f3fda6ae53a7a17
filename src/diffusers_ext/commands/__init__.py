# SPDX-License-Identifier: Apache-2.0
"""The command line; nothing heavy is imported before the command that needs it runs."""
