# SPDX-License-Identifier: Apache-2.0
import pytest
import torch
from official_memorization import fixture, guided, parameters

from diffusers_ext.methods.memorization.curvature_memorization import (
    arnoldi,
    finite_difference,
    hutchinson_trace,
    jacobian_product,
    norms,
    resolve_backend,
    score_spectrum,
    sharpness,
)
from diffusers_ext.methods.memorization.metrics_memorization import auc


KINDS = ("eps", "v")


@pytest.mark.parametrize("kind", KINDS)
class TestSharpness:
    def test_jacobian_products_of_the_official_run(self, kind):
        tensors = fixture(f"detect_{kind}")
        denoiser = guided(kind, tensors, 3)
        for side, name in (("conditional", "hvp_cond"), ("unconditional", "hvp_uncond")):
            mine = jacobian_product(
                denoiser, tensors["step0.latents"], 981, tensors["step0.score_delta"], "jvp", side=side
            )
            torch.testing.assert_close(mine, tensors[f"step0.{name}"], atol=1e-4, rtol=1e-3)

    def test_double_precision(self, kind):
        tensors = fixture(f"detect_{kind}")
        denoiser = guided(kind, tensors, 3, torch.float64)
        for step in range(3):
            x, t = tensors[f"step{step}.latents"].double(), tensors[f"step{step}.timestep"]
            torch.testing.assert_close(
                sharpness(denoiser, x, t, "jvp")[0], tensors[f"step{step}.metric_f64"], atol=0, rtol=1e-6
            )

    def test_single_precision(self, kind):
        tensors = fixture(f"detect_{kind}")
        value = sharpness(guided(kind, tensors, 3), tensors["step0.latents"], 981, "jvp")[0]
        torch.testing.assert_close(value.double(), tensors["step0.metric_f64"], atol=0, rtol=1e-3)

    def test_finite_difference_is_within_half_a_percent(self, kind):
        tensors = fixture(f"detect_{kind}")
        denoiser = guided(kind, tensors, 3)
        for step in range(3):
            value = sharpness(denoiser, tensors[f"step{step}.latents"], tensors[f"step{step}.timestep"], "fd")[0]
            for name in ("metric_f64", "fd_metric_f64"):
                torch.testing.assert_close(value.double(), tensors[f"step{step}.{name}"], atol=0, rtol=5e-3)

    def test_published_formula_by_name(self, kind):
        tensors = fixture(f"detect_{kind}")
        denoiser = guided(kind, tensors, 3, torch.float64, official_v_formula=True)
        value = sharpness(denoiser, tensors["step0.latents"].double(), 981, "jvp")[0]
        torch.testing.assert_close(value, tensors["step0.metric_official_formula_f64"], atol=0, rtol=1e-6)

    def test_mean_over_seeds_is_the_published_score(self, kind):
        tensors = fixture(f"detect_{kind}")
        denoiser = guided(kind, tensors, 3, official_v_formula=True)
        mine = [
            sharpness(denoiser, tensors[f"step{s}.latents"], tensors[f"step{s}.timestep"], "jvp")[0].mean()
            for s in range(3)
        ]
        torch.testing.assert_close(torch.stack(mine), tensors["official_metric_mean"], atol=0, rtol=1e-3)

    def test_exact_objective_is_the_square(self, kind):
        tensors = fixture(f"objective_{kind}")
        denoiser = guided(kind, tensors, 2, torch.float64)
        value = sharpness(denoiser, tensors["x"], tensors["timestep"], "jvp", squared=True)[0]
        torch.testing.assert_close(value, tensors["exact_hvp_sq.value"], atol=0, rtol=1e-6)
        torch.testing.assert_close(value, tensors["fd_small_delta"], atol=0, rtol=1e-3)

    def test_no_parameter_gets_a_gradient(self, kind):
        tensors = fixture(f"detect_{kind}")
        denoiser = guided(kind, tensors, 3)
        value = sharpness(denoiser, tensors["step0.latents"], 981, "jvp")[0]
        assert not value.requires_grad and all(p.grad is None for p in denoiser.denoiser.parameters())

    def test_equal_prompts_have_none(self, kind):
        tensors = fixture(f"detect_{kind}")
        tensors["negative_prompt_embeds"] = tensors["prompt_embeds"]
        for backend in ("jvp", "fd"):
            value = sharpness(guided(kind, tensors, 3), tensors["step0.latents"], 981, backend)[0]
            assert value.eq(0).all()


class TestCurvature:
    tensors = fixture("curvature")

    def denoiser(self):
        return guided("eps", self.tensors, 1, torch.float64)

    @pytest.mark.parametrize("side, name", [("conditional", "cond"), ("unconditional", "uncond")])
    def test_hutchinson(self, side, name):
        probes = self.tensors["rademacher"].view(64, 1, 4, 8, 8)
        x = self.tensors["x"].double()
        estimate = hutchinson_trace(self.denoiser(), x, self.tensors["timestep"], probes, "jvp", side)
        assert estimate.item() == pytest.approx(self.tensors[f"{name}.hutchinson64"].item(), rel=1e-6)

    @pytest.mark.parametrize("side, name", [("conditional", "cond"), ("unconditional", "uncond")])
    def test_spectrum(self, side, name):
        iterations = parameters("curvature")["arnoldi_iterations"]
        start = self.tensors["krylov_start"]
        x, t = self.tensors["x"].double(), self.tensors["timestep"]
        found = score_spectrum(self.denoiser(), x, t, iterations, "jvp", side, start=start.view_as(x))
        torch.testing.assert_close(found.hessenberg, self.tensors[f"{name}.arnoldi_hessenberg"], atol=1e-7, rtol=1e-6)
        expected = torch.complex(self.tensors[f"{name}.ritz_real"], self.tensors[f"{name}.ritz_imag"])

        def multiset(values):
            return sorted((round(v.real, 6), round(abs(v.imag), 6)) for v in values.tolist())

        assert multiset(found.ritz_values) == multiset(expected)

    def test_score_of_the_fixture(self):
        unconditional, conditional = self.denoiser().scores(self.tensors["x"].double(), self.tensors["timestep"])
        torch.testing.assert_close(conditional.float(), self.tensors["cond.score"], atol=2e-5, rtol=0)
        torch.testing.assert_close(unconditional.float(), self.tensors["uncond.score"], atol=2e-5, rtol=0)

    @pytest.mark.parametrize("side, name", [("conditional", "cond"), ("unconditional", "uncond")])
    def test_jacobian_is_that_of_the_fixture(self, side, name):
        x, known = self.tensors["x"].double(), {k: self.tensors[f"{name}.{k}"] for k in self.SUMMARIES}
        # All columns at once: a sample per direction.
        denoiser = guided("eps", self.tensors, x.numel(), torch.float64)
        directions = torch.eye(x.numel()).double().view(-1, *x.shape[1:])
        columns = jacobian_product(
            denoiser, x.expand_as(directions), self.tensors["timestep"], directions, "jvp", side
        )
        jacobian = columns.flatten(1).T
        found = {
            "trace": jacobian.trace(),
            "fro": jacobian.norm(),
            "asymmetry": (jacobian - jacobian.T).norm() / jacobian.norm(),
            "trace_cubed": (jacobian @ jacobian @ jacobian).trace(),
        }
        for summary, value in found.items():
            assert value.item() == pytest.approx(known[summary].item(), rel=1e-6), summary
        symmetric = torch.linalg.eigvalsh((jacobian + jacobian.T) / 2)
        torch.testing.assert_close(symmetric, known["sym_eig"], atol=1e-7, rtol=1e-6)
        assert (symmetric >= 0).sum() == known["num_nonneg_sym"]
        values = torch.linalg.eigvals(jacobian)
        largest = values[values.abs().argsort(descending=True)[:16]]
        expected = torch.complex(known["eig_top16_real"], known["eig_top16_imag"])
        # Conjugate pairs may swap.
        for one, other in ((largest, expected), (expected, largest)):
            assert (one[:, None] - other).abs().amin(1).max() < 1e-6

    SUMMARIES = (
        "trace", "fro", "asymmetry", "trace_cubed", "sym_eig", "num_nonneg_sym", "eig_top16_real", "eig_top16_imag",
    )  # fmt: skip


class TestArnoldi:
    def test_whole_space_gives_all_eigenvalues(self):
        matrix = torch.diag(torch.arange(1.0, 6.0)).double()
        found = arnoldi(lambda v: matrix @ v, torch.ones(5).double(), 5)
        torch.testing.assert_close(found.ritz_values.real, torch.arange(5.0, 0, -1).double())

    def test_closed_space_ends_early_with_the_same_output(self):
        matrix = torch.diag(torch.tensor([3.0, 3.0, 1.0, 1.0])).double()
        found = arnoldi(lambda v: matrix @ v, torch.ones(4).double(), 4)
        assert found.hessenberg.shape == (2, 2) and found.basis.shape == (2, 4)
        torch.testing.assert_close(found.ritz_values.real, torch.tensor([3.0, 1.0]).double())

    def test_basis_is_orthonormal(self):
        matrix = torch.randn(30, 30, generator=torch.Generator().manual_seed(0)).double()
        basis = arnoldi(lambda v: matrix @ v, torch.ones(30).double(), 12).basis
        torch.testing.assert_close(basis @ basis.T, torch.eye(12).double())


def test_finite_difference_of_a_linear_map_is_exact():
    matrix = torch.randn(6, 6, generator=torch.Generator().manual_seed(0)).double()
    x, tangent = torch.randn(2, 3, 6, generator=torch.Generator().manual_seed(1)).double()
    torch.testing.assert_close(finite_difference(lambda x: x @ matrix, x, tangent, 0.3), tangent @ matrix)


def test_analytic_world_is_told_apart_by_sharpness_alone():
    tensors = fixture("analytic_world")
    known = parameters("analytic_world")["detect"]
    a2 = 0.005775495897978544
    # Scores of the noised Gaussians; the unconditional one is the standard normal.
    variance = (a2 * tensors["detect.variance"] + 1 - a2)[:, None, None]
    mean = a2**0.5 * tensors["detect.mean"][:, None]
    x = tensors["detect.x"].double()
    difference = (mean - x) / variance + x
    curved = (1 - 1 / variance) * difference
    torch.testing.assert_close(difference.norm(dim=-1), tensors["detect.score_diff_norm"], atol=0, rtol=1e-8)
    torch.testing.assert_close(curved.norm(dim=-1), tensors["detect.sharpness"], atol=0, rtol=1e-8)
    memorised = tensors["detect.is_memorised"]
    for name, expected in (("score_diff_norm", "auc_score_diff"), ("sharpness", "auc_sharpness")):
        scores = tensors[f"detect.{name}"].mean(1)
        assert auc(scores[memorised], scores[~memorised]) == pytest.approx(known[expected], abs=1e-9)


class TestBadInput:
    x = torch.zeros(3, 4, 8, 8)

    def denoiser(self):
        return guided("eps", fixture("detect_eps"), 3)

    def test_unknown_backend(self):
        with pytest.raises(ValueError, match="one of auto, jvp, fd"):
            resolve_backend("autograd", self.denoiser().denoiser)

    def test_unknown_side(self):
        with pytest.raises(ValueError, match="one of conditional, unconditional, difference"):
            jacobian_product(self.denoiser(), self.x, 981, self.x, side="both")

    def test_displacement_of_zero(self):
        with pytest.raises(ValueError, match="`displacement` has to be positive"):
            jacobian_product(self.denoiser(), self.x, 981, self.x, "fd", displacement=0.0)

    def test_model_without_forward_mode(self):
        class Square(torch.autograd.Function):
            @staticmethod
            def forward(ctx, x):
                return x * x

            @staticmethod
            def backward(ctx, gradient):
                return gradient

        denoiser = self.denoiser()
        denoiser.denoiser.conv_out.register_forward_hook(lambda module, args, output: Square.apply(output))
        with pytest.raises(RuntimeError, match="backend='fd'"):
            sharpness(denoiser, self.x + 1, 981, "jvp")
        assert norms(sharpness(denoiser, self.x + 1, 981, "fd")[1]).isfinite().all()

    def test_compiled_models_get_finite_differences(self):
        model = self.denoiser().denoiser
        assert resolve_backend("auto", model) == "jvp"
        assert resolve_backend("auto", torch.compile(model)) == "fd"

    def test_spectrum_of_several_samples(self):
        with pytest.raises(ValueError, match="one sample at a time"):
            score_spectrum(self.denoiser(), self.x, 981)

    def test_arnoldi_from_zero(self):
        with pytest.raises(ValueError, match="not zero"):
            arnoldi(lambda v: v, torch.zeros(3))

    def test_arnoldi_without_iterations(self):
        with pytest.raises(ValueError, match="has to be positive"):
            arnoldi(lambda v: v, torch.ones(3), 0)
