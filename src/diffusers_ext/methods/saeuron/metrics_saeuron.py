# SPDX-License-Identifier: Apache-2.0
"""The three figures of UnlearnCanvas, out of tables of classifier accuracies."""

import torch


def unlearning_metrics(in_domain, cross_domain, unlearned=None):
    """
    Unlearning accuracy and what is retained, as UnlearnCanvas counts them
    ([SAeUron](https://huggingface.co/papers/2501.18052), section 5).

    Row `i` of both tables belongs to run `i`, in which one concept (or several) of a domain was unlearned. For styles,
    `in_domain` holds the accuracy on every style and `cross_domain` on every object; for objects it is the other way
    round. Columns that the protocol leaves out, such as UnlearnCanvas' "Seed_Images", must not be in the tables.

    Args:
        in_domain (`torch.Tensor` of shape `(runs, concepts)`):
            Accuracies in [0, 1] in the domain of the unlearned concepts.
        cross_domain (`torch.Tensor` of shape `(runs, other concepts)`):
            Accuracies in [0, 1] in the other domain.
        unlearned (`torch.Tensor` of shape `(runs, concepts)`, *optional*):
            Boolean: which columns run `i` unlearned. By default run `i` unlearned column `i`.

    Returns:
        `dict[str, float]`: `UA`, one minus the accuracy on unlearned concepts; `IRA`, accuracy on the other concepts
        of the domain; `CRA`, accuracy in the other domain. All in [0, 1], averaged over the runs with equal weights.

    Raises:
        ValueError: on tables that do not fit together, accuracies outside [0, 1], or a run that unlearned nothing or
        everything.

    Example:

    ```py
    >>> import torch
    >>> from diffusers_ext.methods.saeuron.metrics_saeuron import unlearning_metrics

    >>> unlearning_metrics(torch.tensor([[0.0, 1.0], [0.5, 0.25]]), torch.tensor([[1.0], [0.5]]))
    {'UA': 0.875, 'IRA': 0.75, 'CRA': 0.75}
    ```
    """
    in_domain, cross_domain = torch.as_tensor(in_domain).double(), torch.as_tensor(cross_domain).double()
    if in_domain.ndim != 2 or cross_domain.ndim != 2 or len(in_domain) != len(cross_domain):
        raise ValueError(
            f"Both tables need one row per run but have shapes {tuple(in_domain.shape)} and "
            f"{tuple(cross_domain.shape)}."
        )
    for table in (in_domain, cross_domain):
        if not ((table >= 0) & (table <= 1)).all():
            raise ValueError("Accuracies have to lie in [0, 1]; divide percentages by 100.")
    if unlearned is None:
        if in_domain.shape[0] != in_domain.shape[1]:
            raise ValueError(f"`unlearned` is needed where `in_domain` is not square; it is {tuple(in_domain.shape)}.")
        unlearned = torch.eye(len(in_domain), dtype=torch.bool)
    if unlearned.shape != in_domain.shape or unlearned.dtype != torch.bool:
        raise ValueError(
            f"`unlearned` has to be boolean of shape {tuple(in_domain.shape)} but is {unlearned.dtype} of "
            f"{tuple(unlearned.shape)}."
        )
    count = unlearned.sum(1)
    if (count == 0).any() or (count == in_domain.shape[1]).any():
        raise ValueError("Every run has to unlearn at least one concept and to leave at least one.")
    target = (in_domain * unlearned).sum(1) / count
    retained = (in_domain * ~unlearned).sum(1) / (in_domain.shape[1] - count)
    return {"UA": 1 - target.mean().item(), "IRA": retained.mean().item(), "CRA": cross_domain.mean(1).mean().item()}
