# SPDX-License-Identifier: Apache-2.0
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from diffusers_ext.methods.saeuron.modeling_saeuron import SparseAutoencoder
from diffusers_ext.methods.saeuron.training_saeuron import (
    SAETrainer,
    geometric_median,
    sae_loss,
)


VARIANTS = (
    "patch", "batch", "sample", "multi", "batch_multi", "unitnorm",
    "patch_dead_many", "patch_dead_few", "batch_dead_many", "batch_dead_few",
)  # fmt: skip
RUNS = ("train_batch", "train_patch", "train_patch_multi")


def official_sae(cfg, d_in, weights):
    modes = [mode for mode in ("batch_topk", "sample_topk") if cfg[mode]]
    sae = SparseAutoencoder(
        d_in=d_in,
        num_latents=cfg["num_latents"],
        expansion_factor=cfg["expansion_factor"],
        k=cfg["k"],
        activation=modes[0] if modes else "topk",
        input_norm="unit" if cfg["input_unit_norm"] else "none",
    )
    sae.load_state_dict(weights)
    return sae


def gradients(sae):
    return {name: parameter.grad for name, parameter in sae.named_parameters()}


@pytest.fixture(scope="module")
def forward(golden):
    return golden("saeuron", "sae_forward")


@pytest.fixture(scope="module")
def outputs(forward):
    """Loss outputs and gradients of every golden variant."""
    found = {}
    for name in VARIANTS:
        variant = forward.info["variants"][name]
        sae = official_sae(variant["cfg"], forward.info["config"]["d_in"], forward.group("weights."))
        dead = variant["dead_mask"]
        output = sae_loss(
            sae,
            forward["x"],
            dead_mask=None if dead is None else forward[f"dead_mask.{dead}"],
            auxk_alpha=forward.info["config"]["auxk_alpha"],
            auxk="official",
            multi_topk=variant["cfg"]["multi_topk"],
        )
        output.loss.backward()
        found[name] = output, gradients(sae)
    return found


@pytest.mark.parametrize("name", VARIANTS)
def test_losses_are_the_official_ones(forward, outputs, name):
    tolerance = {key: forward.info["tolerance"][key] for key in ("atol", "rtol")}
    output = outputs[name][0]
    for key, value in (
        ("loss", output.loss.detach()),
        ("fvu", output.fvu),
        ("auxk_loss", output.auxk_loss),
        ("multi_topk_fvu", output.multi_topk_fvu),
        ("l0_loss", output.l0),
        ("l2_loss", output.l2),
        ("explained_variance", output.explained_variance),
        ("sae_out", output.sample.flatten(0, 1)),
    ):
        torch.testing.assert_close(value, forward[f"{name}.{key}"], **tolerance)


@pytest.mark.parametrize("name", VARIANTS)
def test_gradients_are_the_official_ones(forward, outputs, name):
    for key, expected in forward.group(f"{name}.grad.").items():
        torch.testing.assert_close(outputs[name][1][key], expected, **forward.info["tolerance"]["grads"])


@pytest.mark.parametrize("name", VARIANTS)
def test_the_same_latents_fire_as_officially(forward, outputs, name):
    assert torch.equal(outputs[name][0].fired, forward[f"{name}.fired"])


@pytest.mark.parametrize("mask", ["many", "few"])
def test_corrected_auxk_follows_its_equations(golden, forward, mask):
    corrected = golden("saeuron", "auxk_corrected")
    tolerance = corrected.info["tolerance"]
    cfg = forward.info["variants"]["patch"]["cfg"]
    sae = official_sae(cfg, forward.info["config"]["d_in"], forward.group("weights."))
    output = sae_loss(sae, forward["x"], dead_mask=forward[f"dead_mask.{mask}"])
    output.loss.backward()
    torch.testing.assert_close(output.auxk_loss, corrected[f"{mask}.auxk_loss"], **tolerance)
    torch.testing.assert_close(output.fvu, corrected[f"{mask}.fvu"], **tolerance)
    for key, expected in corrected.group(f"{mask}.grad.").items():
        torch.testing.assert_close(gradients(sae)[key], expected, **tolerance)


def test_geometric_median_is_the_official_one(forward):
    median = geometric_median(forward["x"].flatten(0, 1))
    torch.testing.assert_close(median, forward["geometric_median"], atol=1e-5, rtol=1e-5)


def test_geometric_median_survives_a_token_that_is_the_mean():
    x = torch.tensor([[0.0, 0.0], [1.0, 0.0], [-1.0, 0.0]])
    torch.testing.assert_close(geometric_median(x), torch.zeros(2))


class RecordingTrainer(SAETrainer):
    """Keeps the gradients that the optimiser sees."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.seen = None
        self.optimizer.register_step_pre_hook(self.record)

    def record(self, *_):
        self.seen = {name: grad.clone() for name, grad in gradients(self.sae).items()}


def golden_trainer(run):
    info = run.info
    sae = official_sae(info["sae_cfg"], run["data"].shape[-1], run.group("init."))
    return RecordingTrainer(
        sae,
        num_training_steps=len(info["lr"]),
        learning_rate=info["lr"][0],
        auxk="official",
        auxk_alpha=info["auxk_alpha"],
        multi_topk=info["sae_cfg"]["multi_topk"],
        dead_feature_threshold=info["dead_feature_threshold"],
        max_grad_norm=info["clip_grad_norm"],
        adam_beta1=info["optimiser"]["betas"][0],
        adam_beta2=info["optimiser"]["betas"][1],
        adam_epsilon=info["optimiser"]["eps"],
    )


@pytest.mark.parametrize("name", RUNS)
def test_training_repeats_the_official_run(golden, name):
    run = golden("saeuron", name)
    trainer = golden_trainer(run)
    tolerance = run.info["tolerance"]["weights"]
    batches = run["data"].split(run.info["batch_images"])
    for step, (batch, losses) in enumerate(zip(batches, run.info["fvu_auxk_multi_numdead"], strict=True)):
        assert trainer.optimizer.param_groups[0]["lr"] == pytest.approx(run.info["lr"][step])
        assert torch.equal(trainer.tokens_since_fired, run[f"step{step}.fired_before"])
        assert int(trainer.dead_mask.sum()) == losses[3]
        output = trainer.step(batch)
        got = [float(output.fvu), float(output.auxk_loss), float(output.multi_topk_fvu)]
        assert got == pytest.approx(losses[:3], rel=1e-4, abs=1e-5)
        for key, expected in run.group(f"step{step}.grad.").items():
            torch.testing.assert_close(trainer.seen[key], expected, **tolerance)
            # Adam's first steps are sign-like: where a gradient is zero up to rounding, the weight may go either way.
            sure = expected.abs() > 1e-7
            weight = trainer.sae.state_dict()[key]
            torch.testing.assert_close(weight[sure], run[f"step{step}.after.{key}"][sure], **tolerance)
    assert torch.equal(trainer.tokens_since_fired, run["tokens_since_fired.final"])


def small_sae(**config):
    torch.manual_seed(0)
    return SparseAutoencoder(**{"d_in": 12, "expansion_factor": 4, "k": 3, **config})


def tokens_of_few_directions(num_tokens, d_in=12, seed=0):
    """Tokens that are sparse sums of fixed directions, which an autoencoder can learn."""
    generator = torch.Generator().manual_seed(seed)
    directions = torch.randn(24, d_in, generator=torch.Generator().manual_seed(9))
    amounts = torch.rand(num_tokens, 24, generator=generator)
    return torch.where(amounts > 0.9, amounts, 0.0) @ directions + 0.5


def dense_loss(sae, x):
    """The loss from its definition, through dense latents."""
    sae.train()
    z = sae.encode(x)
    return (sae.decode(z) - x).square().sum() / (x - x.mean(0)).square().sum()


@pytest.mark.parametrize("activation", ["topk", "batch_topk"])
def test_sparse_gradients_equal_dense_ones(activation):
    x = tokens_of_few_directions(200)
    dense, sparse = small_sae(activation=activation), small_sae(activation=activation)
    dense_loss(dense, x).backward()
    sae_loss(sparse, x).loss.backward()
    for name, expected in gradients(dense).items():
        torch.testing.assert_close(gradients(sparse)[name], expected, atol=1e-6, rtol=1e-4)


def test_sparse_gradients_equal_dense_ones_without_b_dec_on_the_input():
    x = tokens_of_few_directions(50)
    dense, sparse = small_sae(apply_b_dec_to_input=False), small_sae(apply_b_dec_to_input=False)
    dense_loss(dense, x).backward()
    sae_loss(sparse, x).loss.backward()
    for name, expected in gradients(dense).items():
        torch.testing.assert_close(gradients(sparse)[name], expected, atol=1e-6, rtol=1e-4)


def test_batch_topk_finds_latents_that_crowd_in_one_token():
    x = tokens_of_few_directions(40)
    # All that is selected belongs to few tokens: the first candidates of a row do not suffice.
    x[0] *= 1000
    dense, sparse = small_sae(activation="batch_topk"), small_sae(activation="batch_topk")
    dense_loss(dense, x).backward()
    output = sae_loss(sparse, x)
    output.loss.backward()
    torch.testing.assert_close(gradients(sparse)["W_dec"], gradients(dense)["W_dec"], atol=1e-6, rtol=1e-4)


def test_training_explains_the_variance():
    x = tokens_of_few_directions(4096)
    trainer = SAETrainer(small_sae(k=4), num_training_steps=150, learning_rate=1e-2)
    first = float(trainer.step(x).fvu)
    for _ in range(149):
        last = float(trainer.step(x, metrics=False).fvu)
    assert last < 0.5 * first and last < 0.2


def test_decoder_rows_keep_their_length_during_a_step():
    trainer = SAETrainer(small_sae(), num_training_steps=10, learning_rate=1e-3)
    trainer.step(tokens_of_few_directions(64))
    # Adam takes away a little of the projection: rows are only nearly of unit norm until the next step begins.
    torch.testing.assert_close(trainer.sae.W_dec.norm(dim=1), torch.ones(48), atol=1e-3, rtol=0)


def test_sample_topk_counts_samples():
    trainer = SAETrainer(small_sae(activation="sample_topk"), num_training_steps=10)
    trainer.step(tokens_of_few_directions(64).view(4, 16, 12))
    assert set(trainer.tokens_since_fired.tolist()) == {0, 4}


def test_micro_batches_average_their_gradients():
    x = tokens_of_few_directions(64)
    one, two = (SAETrainer(small_sae(), num_training_steps=10, learning_rate=1e-3) for _ in range(2))
    one.step(x)
    two.step([x, x])
    for name, expected in one.sae.state_dict().items():
        torch.testing.assert_close(two.sae.state_dict()[name], expected, atol=1e-6, rtol=1e-5)
    assert int(two.tokens_since_fired.max()) == 2 * int(one.tokens_since_fired.max())


@pytest.mark.parametrize("activation", ["topk", "batch_topk"])
def test_resumed_training_equals_uninterrupted_training_bit_for_bit(activation, tmp_path):
    batches = tokens_of_few_directions(6 * 64).split(64)

    def trainer():
        return SAETrainer(small_sae(activation=activation), 6, learning_rate=1e-3, dead_feature_threshold=100)

    straight, first, second = trainer(), trainer(), trainer()
    for batch in batches:
        straight.step(batch)
    for batch in batches[:3]:
        first.step(batch)
    torch.save(first.state_dict(), tmp_path / "state.pt")
    second.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    for batch in batches[3:]:
        second.step(batch)
    for name, expected in straight.sae.state_dict().items():
        assert torch.equal(second.sae.state_dict()[name], expected)
    assert torch.equal(second.tokens_since_fired, straight.tokens_since_fired)


ACTIVATIONS = ("topk", "batch_topk")


def train_small(activation, steps=6, rank=0, world_size=1):
    """A trainer after its last step, on its share of every batch, and the loss of that step."""
    distributed = world_size > 1
    trainer = SAETrainer(
        small_sae(activation=activation),
        steps,
        learning_rate=1e-3,
        dead_feature_threshold=100,
        distributed=distributed,
    )
    for batch in tokens_of_few_directions(steps * 64).split(64):
        output = trainer.step(batch.chunk(world_size)[rank])
    return trainer, output.fvu


def _train_a_share(rank, world_size, folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=world_size)
    for activation in ACTIVATIONS:
        trainer, fvu = train_small(activation, rank=rank, world_size=world_size)
        torch.save({**trainer.state_dict(), "fvu": fvu}, f"{folder}/{activation}-{rank}.pt")
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory):
    """Folder of the states of two processes that trained together, with every activation."""
    folder = tmp_path_factory.mktemp("two_processes")
    mp.spawn(_train_a_share, (2, str(folder)), nprocs=2)
    return folder


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_two_processes_equal_one_on_the_same_tokens(two_processes, activation):
    first, second = (torch.load(two_processes / f"{activation}-{rank}.pt", weights_only=True) for rank in range(2))
    single, fvu = train_small(activation)
    for name, expected in single.sae.state_dict().items():
        assert torch.equal(first["sae"][name], second["sae"][name])
        torch.testing.assert_close(first["sae"][name], expected, atol=1e-5, rtol=0)
    assert torch.equal(first["tokens_since_fired"], single.tokens_since_fired)
    assert float(first["fvu"]) == pytest.approx(float(fvu), rel=1e-5)
    # Dead latents took part: their loss is part of what was compared.
    assert single.dead_mask.any()


class TestBadInput:
    def test_activation_that_is_not_trained(self):
        with pytest.raises(ValueError, match="has to be one of topk, batch_topk, sample_topk but is 'relu'"):
            SAETrainer(small_sae(activation="relu"), 10)

    @pytest.mark.parametrize("option", ["rescale_by_decoder_norm", "skip_connection"])
    def test_variant_that_is_not_trained(self, option):
        with pytest.raises(ValueError, match="read, but not trained"):
            sae_loss(small_sae(**{option: True}), tokens_of_few_directions(8))

    def test_half_precision(self):
        with pytest.raises(ValueError, match="trained in float32 but this one is in torch.float16"):
            SAETrainer(small_sae().half(), 10)

    def test_unknown_auxk(self):
        with pytest.raises(ValueError, match="one of corrected, official but is 'fixed'"):
            sae_loss(small_sae(), tokens_of_few_directions(8), auxk="fixed")

    def test_samples_that_do_not_divide_the_tokens(self):
        with pytest.raises(ValueError, match="divides the 8 tokens but it is 3"):
            sae_loss(small_sae(activation="sample_topk"), tokens_of_few_directions(8), num_samples=3)

    def test_unknown_lr_scheduler(self):
        with pytest.raises(ValueError, match="'steps' is not a valid SchedulerType"):
            SAETrainer(small_sae(), 10, lr_scheduler="steps")

    @pytest.mark.parametrize("shape", [(8, 13), (12,)])
    def test_tokens_of_another_shape(self, shape):
        with pytest.raises(ValueError, match=r"shape \(..., 12\) but have"):
            SAETrainer(small_sae(), 10).step(torch.zeros(shape))

    def test_tokens_that_are_not_finite_change_nothing(self):
        trainer = SAETrainer(small_sae(), 10)
        trainer.step(tokens_of_few_directions(64))
        before = {name: tensor.clone() for name, tensor in trainer.sae.state_dict().items()}
        tokens = tokens_of_few_directions(64)
        tokens[5, 2] = float("nan")
        with pytest.raises(ValueError, match="activations to train on are not finite"):
            trainer.step(tokens)
        assert trainer.global_step == 1
        assert all(torch.equal(trainer.sae.state_dict()[name], tensor) for name, tensor in before.items())

    def test_state_of_another_autoencoder(self):
        trainer = SAETrainer(small_sae(), 10)
        with pytest.raises(ValueError, match="state is of an autoencoder with"):
            trainer.load_state_dict(SAETrainer(small_sae(expansion_factor=2), 10).state_dict())
