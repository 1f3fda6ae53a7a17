# SPDX-License-Identifier: Apache-2.0
"""Prompts with something random in them (Somepalli et al., 2023): the copy is lost, and some of the meaning."""

import random

import numpy as np


KINDS = ("tokens", "numbers", "words")
_NUMBERS = 100_000
# The published protocol leaves out the last of CLIP's 49,408 tokens.
_TOKENS = 49_400


def perturb_prompt(prompt, kind="tokens", count=4, seed=0, tokenizer=None):
    """
    Inserts random tokens, random numbers or repeated words between the words of a prompt.

    Args:
        prompt (`str`):
            The prompt.
        kind (`str`, *optional*, defaults to `"tokens"`):
            `"tokens"` of the vocabulary, `"numbers"` below 100,000, or `"words"` of the prompt itself.
        count (`int`, *optional*, defaults to 4):
            How many; 1 to 8 in the papers.
        seed (`int`, *optional*, defaults to 0):
            The same seed gives the same prompt; no global generator is touched.
        tokenizer (`PreTrainedTokenizer`, *optional*):
            For `"tokens"`.

    Returns:
        `str`

    Raises:
        ValueError: on an unknown kind, a negative count, an empty prompt to repeat words of, or a missing tokenizer.

    Example:

    ```py
    >>> from diffusers_ext.methods.memorization.prompts_memorization import perturb_prompt

    >>> perturb_prompt("a red house", "words", count=1, seed=1)
    'a red house red'
    ```
    """
    if kind not in KINDS:
        raise ValueError(f"`kind` has to be one of {', '.join(KINDS)} but is {kind!r}.")
    if not isinstance(count, int) or count < 0:
        raise ValueError(f"`count` has to be an integer of at least 0 but is {count!r}.")
    if kind == "tokens" and tokenizer is None:
        raise ValueError("Random tokens need the `tokenizer` that they are taken from.")
    # Two generators, in the order of the published protocol: its seeds give its prompts.
    values, places = np.random.RandomState(seed), random.Random(seed)
    original = prompt.split(" ") if prompt else []
    if kind == "words" and not original:
        raise ValueError("An empty prompt has no words to repeat.")
    words = list(original)
    for _ in range(count):
        if kind == "words":
            added = str(values.choice(original))
        elif kind == "numbers":
            added = str(values.randint(0, _NUMBERS))
        else:
            added = tokenizer.decode([int(values.randint(0, min(_TOKENS, tokenizer.vocab_size)))])
        words.insert(places.randint(0, len(words)), added)
    return " ".join(words)
