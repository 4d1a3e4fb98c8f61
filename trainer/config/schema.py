"""The whole config: one pydantic model per TOML table. These names are the interface."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from trainer.config.base import IMPORT_PATH, PLAIN_NAME, Table
from trainer.config.data_tables import DataTable, EvalTable

Count = Annotated[int, Field(ge=1)]
WholeNumber = Annotated[int, Field(ge=0)]
NonNegative = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
# A name becomes a directory: no separators, no leading dot, so that it cannot leave the run directory.
PlainName = Annotated[str, Field(pattern=PLAIN_NAME, max_length=100)]


class RunTable(Table):
    """`[run]`: the run's name and place."""

    name: PlainName = "run"
    """Letters, digits, `_`, `-` and `.`."""
    dir: Annotated[str, Field(min_length=1)] = "runs"
    """The run lives in `<dir>/<name>-<time>`, or where --run-dir says."""
    seed: WholeNumber = 0
    """Of everything random: weights, order of the data, picks."""


class TrainTable(Table):
    """`[train]`: the step loop."""

    steps: Count
    """Optimizer steps."""
    micro_batches: Count = 1
    """m: micro-batches per optimizer step and rank."""
    clip_grad_norm: NonNegative = 1.0
    """Largest norm of the gradient; 0: not clipped."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """fp32, or autocast to bf16 or (CUDA only) fp16 with loss scaling."""
    compile: bool = False
    """torch.compile the model."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: CUDA where there is a device."""
    on_non_finite: Literal["stop", "skip"] = "stop"
    """What a non-finite loss or gradient on any rank does: stop the run, or skip the step."""
    max_skips: Count = 10
    """skip: the run stops after this many skipped steps in a row."""
    spike_sigma: NonNegative = 6.0
    """A loss this many standard deviations above its average writes the step's batches to events.jsonl; 0: never."""


class ModelTable(Table):
    """`[model]`: the model to train."""

    target: Annotated[str, Field(pattern=IMPORT_PATH)] = "trainer.model:build"
    """Import path `package.module:function`; called with vocab_size, dim, num_layers and args."""
    dim: Count = 192
    """Width of the residual stream, and of a layer's recurrent state."""
    num_layers: Count = 4
    """Blocks."""
    args: dict[str, Any] = {}
    """Passed on to the target."""
    weights: Annotated[str, Field(min_length=1)] | None = None
    """Begin with these weights: a .safetensors file, or a directory that `train export` wrote. A resumed run has its own."""


class LedgerTable(Table):
    """`[ledger]`: where recurrent states live between steps."""

    wipe_mode: Literal["none", "full", "lru", "periodic_stale"] = "lru"
    """What is evicted: nothing; everything every wipe_every steps; the least recently stored; the stale."""
    capacity: Count = 4096
    """Groups that a rank can hold."""
    stale_threshold: WholeNumber = 0
    """periodic_stale: groups not stored for this many steps are evicted."""
    sweep_every: Count = 1
    """periodic_stale: steps between sweeps."""
    wipe_every: WholeNumber = 0
    """full: steps between wipes."""
    ownership: Literal["auto", "exchange", "reader"] = "auto"
    """Who holds a group's state: the rank its id hashes to (exchange), or the rank that reads it (reader)."""

    @model_validator(mode="after")
    def _mode_has_its_knob(self) -> LedgerTable:
        if self.wipe_mode == "full" and self.wipe_every == 0:
            raise ValueError('wipe_mode "full" needs wipe_every >= 1')
        if self.wipe_mode == "periodic_stale" and self.stale_threshold == 0:
            raise ValueError('wipe_mode "periodic_stale" needs stale_threshold >= 1')
        return self


class CoordTable(Table):
    """`[objective] coord`: distributional supervision of ordered-bin (coordinate) tokens."""

    first_token: WholeNumber
    """Token id of the first bin."""
    num_bins: Annotated[int, Field(ge=2)]
    """Bins, with consecutive token ids."""
    sigma: Positive
    """Width of the soft target around the true bin, in bins."""
    weight: Positive = 1.0
    """Of this component in the loss."""


class ObjectiveTable(Table):
    """`[objective]`: what is minimised."""

    z_loss: NonNegative = 0.0
    """Coefficient of the squared log-partition; 0: off."""
    token_types: bool = False
    """Report loss and accuracy by type of token, where the tokenizer knows types."""
    coord: CoordTable | None = None
    """Coordinate tokens; absent: off."""


class OptimizerTable(Table):
    """`[optimizer]`: AdamW (Loshchilov and Hutter, 2019)."""

    name: Literal["adamw"] = "adamw"
    """The optimizer."""
    lr: Positive = 1e-3
    """Peak learning rate."""
    betas: Annotated[list[Annotated[float, Field(ge=0, lt=1)]], Field(min_length=2, max_length=2)] = [0.9, 0.95]
    """Averaging of the gradient and of its square."""
    eps: Positive = 1e-8
    """Added to the root of the average square."""
    weight_decay: NonNegative = 0.1
    """Of matrices; vectors (norms, biases, decay rates) are not decayed."""


class SchedulerTable(Table):
    """`[scheduler]`: the learning rate over the run."""

    name: Literal["constant", "linear", "cosine", "wsd"] = "cosine"
    """After the warm-up: constant; linear or cosine to min_lr_ratio at the end; stable, then linear decay (wsd)."""
    warmup_steps: WholeNumber = 0
    """Steps of linear warm-up from 0."""
    min_lr_ratio: Fraction = 0.1
    """Last learning rate over the peak."""
    decay_fraction: Annotated[float, Field(gt=0, le=1)] = 0.2
    """wsd: share of the run's steps that decay at its end."""


class GnsTable(Table):
    """`[gns]`: the gradient noise scale."""

    enabled: bool = True
    """Measure it in every optimizer step."""
    ema: Annotated[float, Field(gt=0, lt=1)] = 0.95
    """Decay of the averages of its numerator and denominator."""


class WandbTable(Table):
    """`[metrics] wandb`: Weights & Biases."""

    mode: Literal["offline", "online", "disabled"] = "disabled"
    """Always explicit, so that nothing prompts for a key."""
    project: Annotated[str, Field(min_length=1)] = "trainer"
    """Project."""
    entity: str | None = None
    """Team or user; absent: the account's default."""
    base_url: str | None = None
    """A server of one's own."""


class MetricsTable(Table):
    """`[metrics]`: what is logged, when and where."""

    log_interval: Count = 10
    """Steps between payloads; step 1 and the last step are always logged."""
    stdout: Literal["auto", "json", "line", "off"] = "auto"
    """auto: the human line on a terminal, JSON payloads elsewhere."""
    per_source: bool = False
    """Also metrics with a source's or modality's name in the key."""
    smoothing_alpha: Annotated[float, Field(gt=0, le=1)] = 0.1
    """Weight of the newest value in `smoothed/*`."""
    peak_tflops: NonNegative = 0.0
    """Peak of one device; 0: from the device's name, or no MFU."""
    wandb: WandbTable = WandbTable()
    """Weights & Biases."""
    tensorboard: bool = False
    """Write TensorBoard event files (needs the extra)."""


class SampleTable(Table):
    """`[sample]`: text that the model writes during the run, in events.jsonl and wandb; it never changes training."""

    every: WholeNumber = 0
    """Steps between samples; 0: none."""
    prompt: str = ""
    """What the model goes on from; empty: the beginning of a document."""
    tokens: Count = 200
    """Tokens to generate; with the bytes tokenizer, bytes."""
    temperature: NonNegative = 1.0
    """Divides the scores; 0 takes the most likely token."""
    top_k: WholeNumber = 0
    """Draw from the k most likely tokens only; 0: from all."""


class CheckpointTable(Table):
    """`[checkpoint]`: what is saved, and where a run goes on."""

    every: WholeNumber = 0
    """Steps between checkpoints; 0: only at the end."""
    keep_last: Count = 2
    """Newest checkpoints that are kept."""
    keep_every: WholeNumber = 0
    """Also keep those at multiples of this step; 0: none."""
    background: bool = False
    """Write the files in a thread while training goes on."""
    resume: Annotated[str, Field(min_length=1)] = "off"
    """off; auto: the run directory's newest whole checkpoint, if any; or a checkpoint's path."""


class DistributedTable(Table):
    """`[distributed]`: the process group."""

    backend: Literal["auto", "gloo", "nccl"] = "auto"
    """auto: nccl on CUDA, gloo on the CPU."""
    timeout_sec: Positive = 600.0
    """After this long without an answer a collective fails and the run ends."""


class RunConfig(Table):
    """A whole, validated run."""

    run: RunTable = RunTable()
    """Name and place."""
    train: TrainTable
    """Step loop."""
    data: DataTable
    """Data."""
    eval: EvalTable = EvalTable()
    """Evaluation."""
    model: ModelTable = ModelTable()
    """Model."""
    ledger: LedgerTable = LedgerTable()
    """Ledger."""
    objective: ObjectiveTable = ObjectiveTable()
    """Objective."""
    optimizer: OptimizerTable = OptimizerTable()
    """Optimizer."""
    scheduler: SchedulerTable = SchedulerTable()
    """Learning rate."""
    gns: GnsTable = GnsTable()
    """Noise scale."""
    metrics: MetricsTable = MetricsTable()
    """Metrics."""
    sample: SampleTable = SampleTable()
    """Samples."""
    checkpoint: CheckpointTable = CheckpointTable()
    """Checkpoints."""
    distributed: DistributedTable = DistributedTable()
    """Process group."""
