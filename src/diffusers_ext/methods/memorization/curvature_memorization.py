# SPDX-License-Identifier: Apache-2.0
"""Jacobians of scores: products, sharpness, trace and spectrum."""

from dataclasses import dataclass

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel


BACKENDS = ("auto", "jvp", "fd")
SIDES = ("conditional", "unconditional", "difference")


def norms(x):
    """Euclidean norm of every sample, `(n,)`, over all axes but the first."""
    return x.flatten(1).norm(dim=1)


def _like(values, x):
    return values.view(-1, *[1] * (x.ndim - 1))


def resolve_backend(backend, denoiser):
    """
    `"jvp"` or `"fd"`: what `"auto"` means for a model.

    Args:
        backend (`str`):
            One of `BACKENDS`.
        denoiser (`torch.nn.Module`):
            Forward-mode derivatives do not go through compiled, offloaded (in groups) or quantised models.

    Raises:
        ValueError: on an unknown name.
    """
    if backend not in BACKENDS:
        raise ValueError(f"`backend` has to be one of {', '.join(BACKENDS)} but is {backend!r}.")
    if backend != "auto":
        return backend
    compiled = hasattr(denoiser, "_orig_mod") or getattr(denoiser, "_compiled_call_impl", None) is not None
    hooked = any(hasattr(module, "_diffusers_hook") for module in denoiser.modules())
    return "fd" if compiled or hooked or getattr(denoiser, "is_quantized", False) else "jvp"


def jvp(function, x, tangent, with_graph=False):
    """
    Product of the Jacobian of `function` at `x` with `tangent`, by one forward-mode pass; `with_graph` keeps what a
    gradient of the product needs.

    Raises:
        RuntimeError: when a layer of the model has no forward-mode derivative.
    """
    try:
        # Only the plain attention kernel has a forward-mode rule.
        with torch.set_grad_enabled(with_graph), sdpa_kernel(SDPBackend.MATH):
            return torch.func.jvp(function, (x.contiguous(),), (tangent.contiguous(),))[1]
    except (NotImplementedError, RuntimeError) as error:
        raise RuntimeError(
            f"The model has no forward-mode derivative ({error}). Use `backend='fd'`, which works with any model."
        ) from error


def finite_difference(function, x, tangent, displacement):
    """
    The same by a central difference of norm `displacement` per sample; exact to its square.

    Where the tangent of a sample is 0, so is the result.
    """
    length = _like(norms(tangent), tangent)
    step = displacement * torch.where(length > 0, tangent / length, 0.0)
    return (function(x + step) - function(x - step)) * length / (2 * displacement)


def default_displacement(dtype):
    """0.01 in single or double precision; 1 in half precision, where less drowns in rounding."""
    return 0.01 if dtype in (torch.float32, torch.float64) else 1.0


def jacobian_product(denoiser, x, timestep, tangent, backend="auto", side="difference", displacement=None):
    """
    Product of the Jacobian of a score with a tangent, per sample.

    Args:
        denoiser ([`GuidedDenoiser`]):
            The model with its prompts.
        x (`torch.Tensor` of shape `(n, ...)`), timestep (`int` or `torch.Tensor`):
            Where.
        tangent (`torch.Tensor` of shape `(n, ...)`):
            Direction; not normalised.
        backend (`str`, *optional*, defaults to `"auto"`):
            `"jvp"` (forward mode, exact), `"fd"` (central difference, for compiled, offloaded or quantised models), or
            `"auto"`.
        side (`str`, *optional*, defaults to `"difference"`):
            Of the conditional score, of the unconditional one, or of their difference (formed before anything else).
        displacement (`float`, *optional*):
            Norm of the displacement of `"fd"`; see `default_displacement`.

    Returns:
        `torch.Tensor` of shape `(n, ...)`

    Raises:
        ValueError: on unknown names, or a displacement that is not positive.
        RuntimeError: when forward mode does not go through the model.
    """
    if side not in SIDES:
        raise ValueError(f"`side` has to be one of {', '.join(SIDES)} but is {side!r}.")

    def function(x):
        if side == "difference":
            return denoiser.difference(x, timestep, with_grad=True)
        return denoiser.scores(x, timestep, with_grad=True)[side == "conditional"]

    if resolve_backend(backend, denoiser.denoiser) == "jvp":
        return jvp(function, x, tangent)
    if displacement is None:
        displacement = default_displacement(denoiser.prompt_embeds.dtype)
    if not displacement > 0:
        raise ValueError(f"`displacement` has to be positive but is {displacement}.")
    with torch.no_grad():
        return finite_difference(function, x, tangent, displacement)


def sharpness(denoiser, x, timestep, backend="auto", displacement=None, squared=False):
    r"""
    `||H_D s_D||` per sample ([Jeon et al.](https://huggingface.co/papers/2412.04140), section 4.4): how strongly the
    difference of the scores bends along itself.

    Args:
        denoiser, x, timestep, backend, displacement:
            As of `jacobian_product`.
        squared (`bool`, *optional*, defaults to `False`):
            Whether to return the square, as the paper writes it. The published code, and the thresholds, do not.

    Returns:
        `tuple` of the sharpness, `(n,)`, and the difference it was taken at, `(n, ...)`.
    """
    difference = denoiser.difference(x, timestep)
    value = norms(jacobian_product(denoiser, x, timestep, difference, backend, displacement=displacement))
    return value.square() if squared else value, difference


def hutchinson_trace(denoiser, x, timestep, probes, backend="auto", side="conditional"):
    """
    Trace of the Jacobian of a score, estimated as the mean of `v^T J v` over random probes.

    Args:
        denoiser, x, timestep, backend, side:
            As of `jacobian_product`.
        probes (`torch.Tensor` of shape `(k, n, ...)`):
            Independent entries of mean 0 and variance 1; signs (Rademacher) have the least variance.

    Returns:
        `torch.Tensor` of shape `(n,)`
    """
    total = 0
    for probe in probes.to(x.dtype):
        total = total + (probe * jacobian_product(denoiser, x, timestep, probe, backend, side)).flatten(1).sum(1)
    return total / len(probes)


@dataclass
class ArnoldiOutput:
    """
    A Krylov space.

    Args:
        hessenberg (`torch.Tensor` of shape `(m, m)`):
            The operator inside the space; upper Hessenberg.
        basis (`torch.Tensor` of shape `(m, d)`):
            Orthonormal rows.
        ritz_values (`torch.Tensor` of shape `(m,)`):
            Complex, the largest modulus first: approximate eigenvalues of the operator.
    """

    hessenberg: torch.Tensor
    basis: torch.Tensor
    ritz_values: torch.Tensor


def arnoldi(operator, start, num_iterations=20, tolerance=1e-10):
    """
    Arnoldi iteration: approximate eigenvalues of an operator that need not be symmetric (paper, appendix A.2; a
    learned score is no gradient, so Lanczos would not do).

    Args:
        operator (`Callable`):
            From a vector `(d,)` to a vector `(d,)`.
        start (`torch.Tensor` of shape `(d,)`):
            Not zero.
        num_iterations (`int`, *optional*, defaults to 20):
            Size of the space; smaller where the operator maps it into itself.
        tolerance (`float`, *optional*, defaults to 1e-10):
            Norm, relative to the operator's image, below which the space counts as closed.

    Returns:
        [`ArnoldiOutput`]

    Raises:
        ValueError: on a start that is zero, or no iterations.
    """
    if num_iterations < 1:
        raise ValueError(f"`num_iterations` has to be positive but is {num_iterations}.")
    length = start.norm()
    if not length > 0:
        raise ValueError("`start` has to be a finite vector that is not zero.")
    basis = [start / length]
    hessenberg = start.new_zeros(num_iterations + 1, num_iterations)
    size = num_iterations
    for column in range(num_iterations):
        image = operator(basis[column])
        scale = image.norm()
        # Twice: what rounding leaves of the first pass would spoil the basis.
        for _ in range(2):
            for row, vector in enumerate(basis):
                overlap = vector @ image
                hessenberg[row, column] += overlap
                image = image - overlap * vector
        rest = image.norm()
        hessenberg[column + 1, column] = rest
        if rest <= tolerance * scale:
            size = column + 1
            break
        basis.append(image / rest)
    hessenberg = hessenberg[:size, :size].clone()
    values = torch.linalg.eigvals(hessenberg)
    return ArnoldiOutput(hessenberg, torch.stack(basis[:size]), values[values.abs().argsort(descending=True)])


def score_spectrum(denoiser, x, timestep, num_iterations=20, backend="auto", side="conditional", start=None):
    """
    Approximate eigenvalues of the Jacobian of a score at one sample (paper, figures 3 and 5): a memorised one has more
    and larger negative ones.

    Args:
        denoiser, x (`(1, ...)`), timestep, backend, side:
            As of `jacobian_product`.
        num_iterations (`int`, *optional*, defaults to 20):
            Jacobian products to spend.
        start (`torch.Tensor` of the shape of `x`, *optional*):
            Start of the iteration; `x` by default.

    Returns:
        [`ArnoldiOutput`]

    Raises:
        ValueError: with more than one sample.
    """
    if x.shape[0] != 1:
        raise ValueError(f"A spectrum is taken of one sample at a time but `x` has {x.shape[0]}; use `select`.")

    def operator(vector):
        return jacobian_product(denoiser, x, timestep, vector.view_as(x), backend, side).flatten()

    return arnoldi(operator, (x if start is None else start).flatten(), num_iterations)
