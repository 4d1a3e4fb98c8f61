"""The whole config: one pydantic model per TOML table. Tables and keys are public interface."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import Field

from trainer.config.data_tables import (
    PLAIN_NAME,
    SOURCE_NAME,
    Args,
    AutoSwitch,
    BatchSize,
    BelowOne,
    DataTable,
    EvalTable,
    Fraction,
    ImportPath,
    Seconds,
    Seed,
    Table,
    refuse_lone_args,
)
from trainer.options import (
    Amount,
    CoordOptions,
    Count,
    Factor,
    LedgerOptions,
    MicroBatches,
    ObjectiveOptions,
    PositiveFactor,
    Size,
    StrategyOptions,
    Text,
    Tokens,
    TrackerOptions,
    WholeNumber,
)


class RunTable(Table):
    """`[run]`: name, directory and seed of the run."""

    # It becomes a directory: no separator and no leading dot, so it stays inside run.dir.
    name: Annotated[str, Field(pattern=PLAIN_NAME, max_length=100)] = "run"
    """Letters, digits, `_`, `-` and `.`."""
    dir: Text = "runs"
    """Parent of the run directory `<name>-<time>`; --run-dir overrides both."""
    seed: Seed = 0
    """Seed of all randomness."""


class TrainTable(Table):
    """`[train]`: the training loop."""

    steps: WholeNumber = 0
    """Number of optimizer steps; 0: see tokens."""
    tokens: Tokens = 0
    """Length in target tokens over all ranks, to within two steps; 0: see steps."""
    micro_batches: BatchSize = 1
    """m: micro-batches per step and rank (gradient accumulation), or a plan (docs/gns.md)."""
    activation_checkpointing: Literal["off", "block"] = "off"
    """Recompute activations by block (of the nn.ModuleList)."""
    clip_grad_norm: Amount = 1.0
    """Maximum gradient norm; 0: no clipping."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """bf16: autocast to it; auto: bf16 where CUDA has it, otherwise fp32."""
    compile: AutoSwitch = "auto"
    """Compile blocks with torch.compile. auto: built-in families on CUDA with Triton."""
    cuda_graph: AutoSwitch = "auto"
    """Replay CUDA graphs (docs/gpu.md#cuda-graphs). auto: built-in families where possible."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: CUDA where available, otherwise the CPU."""
    on_non_finite: Literal["stop", "skip"] = "stop"
    """On a non-finite loss or gradient: stop the run, or skip the step, up to 10 in a row."""
    ema: BelowOne = 0.0
    """Decay (such as 0.999) of averaged weights (docs/evaluation.md#averaged-weights); 0: none."""
    spike_sigma: Factor = 0.0
    """Record a loss this many standard deviations (such as 6) above the running mean; 0: off."""

    def check(self) -> None:
        """Refuse a run without a length."""
        if self.steps == 0 and self.tokens == 0:
            raise ValueError("how long is the run? set steps, or tokens")


class ModelTable(Table):
    """`[model]`: the model to train."""

    family: Text | None = None
    """A built-in model (docs/models.md); absent, without target: "rglru"."""
    target: ImportPath | None = None
    """Your own, `package.module:function`: called with vocab_size, dim, num_layers and args."""
    dim: Size = 192
    """Width of the residual stream and of each layer's recurrent state."""
    # Each takes about 6 ms to build, on the meta device too.
    num_layers: Annotated[int, Field(ge=1, le=2000)] = 4
    """Number of blocks."""
    args: Args = {}
    """Further keyword arguments of the family or the target."""
    weights: Text | None = None
    """Initial weights: a .safetensors file, or an export's directory. Ignored on resume."""
    contract: bool = True
    """Check your own model's contract before a run, by some hundred calls of copies."""

    def check(self) -> None:
        """Refuse two models."""
        if self.family is not None and self.target is not None:
            raise ValueError(f'family "{self.family}" and target "{self.target}" are two models: remove one')


class LedgerTable(Table, LedgerOptions):
    """`[ledger]`: storage of recurrent states between steps."""


class CoordTable(Table, CoordOptions):
    """`[objective] coord`: supervision of coordinate tokens, which are ordered bins."""


class ObjectiveTable(Table, ObjectiveOptions):
    """`[objective]`: the loss."""

    target: ImportPath | None = None
    """Your own class in place of the cross-entropy (docs/models.md#losses-and-metrics)."""
    args: Args = {}
    """Keyword arguments of target."""
    coord: CoordTable | None = None
    token_types: bool = False
    """Also report loss and accuracy by token type, if the tokenizer has types."""
    chunk_tokens: WholeNumber = 0
    """Compute the loss in chunks of this many tokens to save memory; 0: at once."""
    losses: dict[Annotated[str, Field(pattern=SOURCE_NAME)], Factor] = {}
    """Name -> weight of a loss of the model's output; absent: 1; 0: computed and not trained on."""

    def check(self) -> None:
        """Refuse losses that cannot be computed, and keys without effect."""
        _refuse_ineffective(self, {"token_ce", "z_loss", "coord"})
        if self.chunk_tokens and not self.components:
            raise ValueError("no loss of logits is left that chunk_tokens could cut: set it to 0")

    @property
    def components(self) -> tuple[str, ...]:
        """Names of the parts of the loss that are computed from the model's logits."""
        if self.target:  # which replaces all of them
            return ("own",)
        return tuple(name for name in ("token_ce", "z_loss", "coord") if getattr(self, name))


class OptimizerGroupTable(Table):
    """`[[optimizer.group]]`: settings of the parameters whose names match."""

    match: Text
    """Pattern of the names, such as "embedding.*"; the first group that matches counts."""
    lr_scale: PositiveFactor = 1.0
    """Their learning rate as a multiple of the others'."""
    weight_decay: Factor | None = None
    """Theirs, for matrices and vectors alike; absent: as without the group."""


class OptimizerTable(Table):
    """`[optimizer]`: how weights are updated."""

    name: Literal["adamw", "muon", "sgd"] = "adamw"
    """muon (Jordan et al., 2024): for matrices except embedding and output (docs/models.md); adamw for the rest."""
    target: ImportPath | None = None
    """Import path of your own `(groups, *, lr, **args)`; replaces name."""
    args: Args = {}
    """Keyword arguments of target."""
    # Within float32: a rate may be chosen to diverge.
    lr: Annotated[float, Field(gt=0, le=1e38)] = 1e-3
    """Peak learning rate; one rate fits adamw and muon."""
    betas: Annotated[list[BelowOne], Field(min_length=2, max_length=2)] = [0.9, 0.95]
    """adamw: decay rates of the moving averages of the gradient and of its square."""
    eps: Annotated[float, Field(gt=0, le=1)] = 1e-8
    """adamw: added to the denominator of the update."""
    momentum: BelowOne = 0.95
    """muon and sgd: decay rate of the moving sum of gradients (Nesterov's)."""
    weight_decay: Factor = 0.1
    """Not for vectors: norms, biases, decay rates (docs/models.md)."""
    group: list[OptimizerGroupTable] = []

    def check(self) -> None:
        """Refuse keys without effect."""
        unused = {"adamw": ["momentum"], "sgd": ["betas", "eps"]}
        _refuse_ineffective(self, {"name", "betas", "eps", "momentum"}, unused.get(self.name, []))


def _refuse_ineffective(table: Any, replaced: Iterable[str], unused: Iterable[str] = ()) -> None:
    """Refuse `args` without a `target`, and keys that a target replaces, or that are `unused` without
    one, unless they have their defaults, as in a config with all filled in."""
    refuse_lone_args(table)
    keys, why = unused, "with this name: remove them, or choose another"
    if table.target is not None:
        keys, why = replaced, "beside target: give them to it as args"
    fields = type(table).model_fields
    others = sorted(key for key in keys if getattr(table, key) != fields[key].default)
    if others:
        raise ValueError(f"{', '.join(others)} would have no effect {why}")


class SchedulerTable(Table):
    """`[scheduler]`: the learning rate over the run."""

    name: Literal["constant", "linear", "cosine", "wsd"] = "cosine"
    """After the warm-up: constant; linear or cosine decay; wsd: stable, then linear decay."""
    target: ImportPath | None = None
    """Your own, called with step, steps, peak (optimizer.lr) and args, in place of the rest."""
    args: Args = {}
    """Keyword arguments of target."""
    warmup_steps: WholeNumber = 0
    """Steps of linear warm-up from 0."""
    warmup_tokens: Tokens = 0
    """The same in tokens, with train.tokens."""
    min_lr_ratio: Fraction = 0.1
    """Final learning rate as a fraction of the peak."""
    decay_fraction: Annotated[float, Field(gt=0, le=1)] = 0.2
    """wsd: final fraction of the run over which the learning rate decays."""

    def check(self) -> None:
        """Refuse keys without effect."""
        if self.warmup_steps and self.warmup_tokens:
            raise ValueError("warmup_steps and warmup_tokens say the same: keep one")
        of_decays = {"constant": ["min_lr_ratio", "decay_fraction"], "wsd": []}
        unused = of_decays.get(self.name, ["decay_fraction"])
        _refuse_ineffective(self, type(self).model_fields.keys() - {"target", "args"}, unused)


class GnsTable(Table):
    """`[gns]`: the gradient noise scale."""

    enabled: bool = True
    """Measure it in every optimizer step."""


class WandbTable(Table):
    """`[metrics] wandb`: Weights & Biases. WANDB_ENTITY and WANDB_BASE_URL are honored."""

    mode: Literal["auto", "offline", "online", "disabled"] = "auto"
    """auto: WANDB_MODE, or online with a login, otherwise offline, in the run directory."""
    project: Text = Field(
        default_factory=lambda: os.environ.get("WANDB_PROJECT") or "trainer",
        json_schema_extra={"default": "trainer"},
    )
    """Project name; absent: WANDB_PROJECT, or "trainer"."""


class MetricsTable(Table, TrackerOptions):
    """`[metrics]`: what is logged, when and where."""

    stdout: Literal["auto", "json", "line", "off"] = "auto"
    """auto: readable lines on a terminal, JSON payloads elsewhere."""
    compare_replicas: bool = True
    """Under ddp, a rank whose weights differ ends the run."""
    per_layer: bool = False
    """Also report gradient norm and update over weight per layer."""
    profile: Annotated[int, Field(ge=0, le=1000)] = 0
    """Steps that torch's profiler records on rank 0; 0: none. Also --profile."""
    wandb: WandbTable = WandbTable()
    tensorboard: bool = False
    """Write TensorBoard event files; needs the extra `tensorboard`."""


class SampleTable(Table):
    """`[sample]`: text generated during the run, in events.jsonl and wandb."""

    every: WholeNumber = 0
    """Steps between samples; 0: none."""
    prompt: Annotated[str, Field(max_length=10**6)] = ""
    """Text to continue; empty: generate from the start of a document."""
    tokens: Size = 200
    """Tokens to generate; with the bytes tokenizer, bytes."""


class CheckpointTable(Table):
    """`[checkpoint]`: saving and resuming."""

    every: WholeNumber = 0
    """Steps between checkpoints; 0: by every_minutes alone."""
    every_minutes: Amount = 30.0
    """Minutes from one save to the next; 0: by every alone."""
    keep_last: Count = 2
    """Number of newest checkpoints to keep."""
    keep_every: WholeNumber = 0
    """Also keep checkpoints at multiples of this step; 0: none."""
    keep_best: Text | None = None
    """Also keep the checkpoint with the lowest such number of an evaluation, "eval_loss"."""
    remote: Text | None = None
    """URL to upload checkpoints to, "s3://bucket/prefix", one per run (docs/reliability.md)."""
    resume: Text = "off"
    """off: new run; auto: latest complete checkpoint, if any; or a checkpoint's path."""


class DistributedTable(Table, StrategyOptions):
    """`[distributed]`: the ranks, and how they share the model."""

    shards: WholeNumber = 0
    """Data shards, a multiple of the ranks; 0: one per rank. With N a run is the same on all
    ranks that divide N (docs/scale.md)."""
    timeout_sec: Seconds = 600.0
    """Seconds without progress that end the run (docs/reliability.md); raise it for slow reads."""


class ExtensionTable(Table):
    """`[[extension]]`: a class of your own that observes the run (docs/extensions.md)."""

    target: ImportPath
    """`package.module:Class`, a subclass of `trainer.training.extension.Extension`."""
    args: Args = {}
    """Keyword arguments of the class."""


class RunConfig(Table):
    """A whole, validated run."""

    run: RunTable = RunTable()
    train: TrainTable
    data: DataTable
    eval: EvalTable = EvalTable()
    model: ModelTable = ModelTable()
    ledger: LedgerTable = LedgerTable()
    objective: ObjectiveTable = ObjectiveTable()
    optimizer: OptimizerTable = OptimizerTable()
    scheduler: SchedulerTable = SchedulerTable()
    gns: GnsTable = GnsTable()
    metrics: MetricsTable = MetricsTable()
    sample: SampleTable = SampleTable()
    checkpoint: CheckpointTable = CheckpointTable()
    distributed: DistributedTable = DistributedTable()
    extension: list[ExtensionTable] = []

    @property
    def micro_batches(self) -> MicroBatches:
        """`train.micro_batches`, whichever form it has."""
        setting = self.train.micro_batches
        if isinstance(setting, int):
            return MicroBatches.constant(setting)
        points = sorted(setting.points.items())
        return MicroBatches(((0, points[0][1]), *points))  # the first point holds before it, too
