"""Opens a run: wraps the model for the ranks, opens the record, starts reading and puts the parts together."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainer.config.schema import RunConfig
from trainer.data.fingerprint import FINGERPRINT_KEY, Fingerprint
from trainer.data.loader import Loader
from trainer.distributed.agree import gather_from_ranks, raise_on_all_ranks
from trainer.distributed.env import RankInfo
from trainer.distributed.strategy import Strategy
from trainer.distributed.watchdog import Watchdog, start_watchdog
from trainer.extensions.profile.step_profile import StepProfile
from trainer.ledger.probe import CarryProbe
from trainer.metrics.best_effort import Diagnostics
from trainer.metrics.catalog.spec import RankReduction
from trainer.metrics.logger import get_logger
from trainer.metrics.rank_reduction import Operations, Reporter, rank_operations
from trainer.metrics.run_status import dead
from trainer.metrics.sinks.events import EventWriter
from trainer.metrics.sinks.stdout import Output
from trainer.objective.compose import Loss
from trainer.training.checkpointing.resume_checks import changed_settings
from trainer.training.checkpointing.saver import Saver
from trainer.training.checkpointing.train_state import Position, TrainState
from trainer.training.checkpointing.tree import pack
from trainer.training.evaluation.evaluator import Evaluator
from trainer.training.evaluation.sampler import Sampler
from trainer.training.messages import announce
from trainer.training.progress import Progress
from trainer.training.run import Run
from trainer.training.run_dir import RunDir, StatusKeeper, environment
from trainer.training.setup.data import EvalSet, max_tokens_per_micro
from trainer.training.setup.evaluation import make_details, make_evaluator
from trainer.training.setup.parts import (
    autocast_context,
    in_cells,
    model_and_loss,
)
from trainer.training.setup.plan import Plan
from trainer.training.setup.sinks import make_sinks, wandb_id
from trainer.training.signals import StopRequest
from trainer.training.step.batch_growth import BatchGrowth
from trainer.training.step.carry import StepProbe
from trainer.training.step.components import coincidence
from trainer.training.step.details import StepDetails
from trainer.training.step.microbatch import accepted_inputs
from trainer.training.step.schedule import make_schedule
from trainer.training.step.step import StepSettings, TrainStep
from trainer.training.step.window import WindowReader
from trainer.wording import few

logger = get_logger(__name__)


def open_run(
    plan: Plan,
    state: TrainState,
    position: Position,
    info: RankInfo,
    device: torch.device,
    run_dir: RunDir,
    *,
    stop: StopRequest,
    stack: ExitStack,
    strategy: Strategy,
    stdout: Output | None = None,
    fingerprint: Fingerprint | None = None,
    eval_sets: Sequence[EvalSet] = (),
    resumed: tuple[Path, Mapping[str, Any]] | None = None,
    describe: Callable[[], None] | None = None,
    verdict: Callable[[], str] | None = None,
    on_published: Callable[[Path], None] | None = None,
) -> Run:
    """The run, ready for its first step. Every rank must call it: wrapping the model communicates.

    Args:
        stack: closes what is opened here.
        stdout: for payloads; None: the standard output as it is.
        fingerprint: of the data, for the checkpoints; None: a resume cannot tell whether the data changed.
        eval_sets: what an evaluation reads.
        resumed: the checkpoint that it continues from and its state.json; None without one.
        describe: writes what the run was started with.
        verdict: gives the words on the run's health that stand beside the progress bar.
        on_published: see `Saver`.
    """
    build = _RunBuilder(plan, state, position, info, device, run_dir, stack, strategy)
    config, diagnostics = plan.config, state.tracker.diagnostics
    events: EventWriter | None = None
    wandb_run_id: str | None = None
    with raise_on_all_ranks(world_size=info.world_size):
        if info.is_main:
            events = build.events()
            wandb_run_id = build.record(events, stdout or sys.stdout, resumed, describe)
            announce(plan, state, device, run_dir)
    stack.callback(state.tracker.close)
    if config.train.compile:
        strategy.compile(state.model)
    # What a row is run through; everything that keeps or shows the model has the model itself.
    cell_model, loss = model_and_loss(state.model, config, device)
    row_model = in_cells(cell_model, config)
    train_step = build.train_step(row_model, loss)
    pack(position.data_state, "data")  # one that a checkpoint cannot keep is refused before the first step
    saver = build.saver(fingerprint, wandb_run_id, is_resumed=resumed is not None, on_published=on_published)
    loader = build.loader()
    watchdog = build.watchdog(stop, loader)
    details = make_details(plan, diagnostics)
    probe = build.probe(row_model, loss)
    reporters = build.reporters(details, probe)
    metric_keys = {name: tuple(reporter.metric_keys) for name, reporter in reporters.items()}
    return Run(
        config=config,
        info=info,
        device=device,
        position=position,
        windows=build.windows(loader, is_resumed=resumed is not None),
        train_step=train_step,
        length=plan.length,
        micro_batches=config.micro_batches,
        num_micros=config.micro_batches.first,
        growth=build.growth(),
        schedule=make_schedule(config, plan.length),
        details=details,
        probe=probe,
        reporters=reporters,
        coincidence_at=build.coincidence_at(),
        metric_keys=metric_keys,
        operations=agreed_operations(itertools.chain(*metric_keys.values()), info),
        diagnostics=diagnostics,
        tracker=state.tracker,
        spikes=state.spikes,
        evaluator=build.evaluator(cell_model, loss, eval_sets),
        sampler=build.sampler(events),
        saver=saver,
        stop=stop,
        watchdog=watchdog,
        events=events,
        progress=build.progress(verdict),
        profile=build.profile(),
        status=StatusKeeper(run_dir, wandb_run_id) if info.is_main else None,
    )


def agreed_operations(keys: Iterable[str], info: RankInfo) -> Operations:
    """How the metrics of all ranks combine, the same on each. Every rank must call it.

    A rank that does not know a metric adds nothing to it. Where ranks disagree, one warning tells who.
    """
    agreed: dict[str, RankReduction] = {}
    notes: list[str] = []
    by_rank = gather_from_ranks(rank_operations(keys), world_size=info.world_size)
    for own in by_rank:
        agreed = {**own, **agreed}
    for rank, own in enumerate(by_rank):
        if missing := sorted(agreed.keys() - own.keys()):
            notes.append(f"rank {rank} has no {few(missing)}")
        if other := [key for key in own if own[key] != agreed[key]]:
            notes.append(f"on rank {rank} the row of {few(other)} in the catalog is another")
    if notes:
        text = "the ranks do not report the same metrics: %s; what a rank does not report is that of the others"
        logger.warning(text, "; ".join(notes))
    return dict(sorted(agreed.items()))


@dataclass(frozen=True)
class _RunBuilder:
    """Makes the parts of a run that take more than one line; a part that is off is None."""

    plan: Plan
    state: TrainState
    position: Position
    info: RankInfo
    device: torch.device
    run_dir: RunDir
    stack: ExitStack
    strategy: Strategy

    @property
    def config(self) -> RunConfig:
        return self.plan.config

    @property
    def diagnostics(self) -> Diagnostics:
        return self.state.tracker.diagnostics

    def events(self) -> EventWriter:
        """Of rank 0; what the guards have to say goes there too."""
        events = EventWriter(self.run_dir.events)
        self.stack.callback(self.diagnostics.best_effort("end of events.jsonl").run, events.close)
        self.diagnostics.on_event = events.write
        return events

    def record(
        self,
        events: EventWriter,
        stdout: Output,
        resumed: tuple[Path, Mapping[str, Any]] | None,
        describe: Callable[[], None] | None,
    ) -> str | None:
        """Open the sinks, say in them if the run restarts, and mark it as running (rank 0).

        Returns:
            The id of the wandb run; None without one.
        """
        # Without a checkpoint too: the record of an earlier attempt is continued, and its steps are repeated.
        is_restart = self.run_dir.metrics.exists() or resumed is not None
        saved = resumed[1] if resumed is not None else {}
        sinks = make_sinks(
            self.config,
            self.run_dir,
            stdout=stdout,
            wandb_run_id=saved.get("wandb_run_id"),
            diagnostics=self.diagnostics,
            on_event=events.write,
        )
        self.state.tracker.init_backends(sinks)
        step = self.position.step
        if is_restart:
            previous = self.run_dir.status()
            if previous.get("state") == "running":  # and this process has its lock
                previous = dead(previous, self.run_dir.path)
            if previous.get("state") == "died":
                logger.warning("%s: %s; continuing from step %d", self.run_dir.path, previous["reason"], step)
            details: dict[str, Any] = {"checkpoint": None}
            if resumed is not None:
                then = saved["config"], saved.get("environment", {})
                changed = changed_settings(*then, self.config, environment(self.info))
                pairs = {key: change._asdict() for key, change in changed.items()}
                details = {"checkpoint": resumed[0].name, "changed": pairs}
            self.state.tracker.log_restart(step, **details)
            ended = {key: previous.get(key) for key in ("state", "reason", "last_step")}
            events.write({"event": "restart", "global_step": step, **details, "previous": ended})
        # After what says that the settings changed: the record is true, wherever this process is killed.
        if describe is not None:
            describe()
        self.run_dir.write_status("running", reason="", step=step, wandb_run_id=wandb_id(sinks))
        return wandb_id(sinks)

    def train_step(self, row_model: nn.Module, loss: Loss) -> TrainStep:
        state, config = self.state, self.config
        return TrainStep(
            model=self.strategy.wrap(row_model, state.model),
            ledger=state.ledger,
            objective=loss,
            optimizer=state.optimizer,
            gns=state.gns,
            per_layer=state.per_layer,
            scaler=state.scaler,
            settings=StepSettings(
                max_tokens_per_micro=max_tokens_per_micro(self.plan),
                clip_grad_norm=config.train.clip_grad_norm,
            ),
            strategy=self.strategy,
            world_size=self.info.world_size,
            device=self.device,
            autocast=autocast_context(config, self.device),
            diagnostics=self.diagnostics,
        )

    def saver(
        self,
        fingerprint: Fingerprint | None,
        wandb_run_id: str | None,
        *,
        is_resumed: bool,
        on_published: Callable[[Path], None] | None,
    ) -> Saver:
        return Saver(
            directory=self.run_dir.checkpoints,
            table=self.config.checkpoint,
            info=self.info,
            state=self.state,
            device=self.device,
            shared={
                "wandb_run_id": wandb_run_id,
                "config": self.config.model_dump(mode="json"),
                "environment": environment(self.info),
                FINGERPRINT_KEY: None if fingerprint is None else fingerprint.to_state(),
            },
            last_saved=self.position.step if is_resumed else -1,
            diagnostics=self.diagnostics,
            on_published=on_published,
        )

    def watchdog(self, stop: StopRequest, loader: Loader) -> Watchdog:
        watchdog = start_watchdog(
            self.info,
            timeout_sec=self.config.distributed.timeout_sec,
            log=self.run_dir.log_file(self.info.rank),
            on_end=lambda reason: self.run_dir.leave_status(
                self.info, "failed", reason=reason, step=self.position.step
            ),
            reading=lambda: loader.reading,
            is_asked=lambda: stop.is_heard or stop.requested,
            groups=self.strategy.groups,
        )
        self.stack.callback(watchdog.close)
        return watchdog

    def reporters(self, details: StepDetails, probe: StepProbe | None) -> dict[str, Reporter]:
        state = self.state
        parts: dict[str, Reporter | None] = {
            "counters": self.position.unlogged,
            "step_details": details,
            "ledger metrics": state.ledger,
            "carry probe": probe,
            "gns": state.gns,
            "per_layer": state.per_layer,
        }
        return {name: part for name, part in parts.items() if part is not None}

    def loader(self) -> Loader:
        loader = Loader(
            self.state.dataset,
            device=self.device,
            prefetch=self.config.data.prefetch,
            guard=self.diagnostics.best_effort("data metrics"),
        )
        self.stack.callback(loader.close)
        return loader

    def windows(self, loader: Loader, *, is_resumed: bool) -> WindowReader:
        return WindowReader(
            loader,
            accepted=accepted_inputs(self.state.model),
            data_state=self.position.data_state,
            info=self.info,
            device=self.device,
            is_resumed=is_resumed,
            burns_in=self.config.ledger.burn_in > 0,
            on_window=None if self.config.micro_batches.is_known_ahead else self.state.dataset.window_begins,
        )

    def growth(self) -> BatchGrowth | None:
        batches = self.config.micro_batches
        if batches.is_constant:
            return None
        return BatchGrowth(
            batches,
            micro_tokens=self.plan.facts.tokens_per_micro,
            noise=self.state.gns,
            guard=self.diagnostics.best_effort("gns"),
            world_size=self.info.world_size,
        )

    def probe(self, row_model: nn.Module, loss: Loss) -> StepProbe | None:
        table = self.config.ledger
        if self.state.ledger is None or not table.probe_every:
            return None
        probe = CarryProbe(
            row_model,
            token_loss=lambda output, targets: loss(output, targets).token_loss,
            cells=table.probe_cells,
            cell_tokens=self.config.row_tokens,
            agree=self.strategy.most,
            autocast=autocast_context(self.config, self.device),
        )
        return StepProbe(probe, ledger=self.state.ledger, tracker=self.state.tracker, device=self.device)

    def coincidence_at(self) -> Callable[[int, int], float] | None:
        if not self.config.gns.components_every:
            return None
        return partial(coincidence, self.state.dataset, [source.concentration for source in self.plan.sources])

    def evaluator(self, cell_model: nn.Module, loss: Loss, sets: Sequence[EvalSet]) -> Evaluator | None:
        if not self.config.eval.every:
            return None
        return make_evaluator(
            self.plan,
            self.state.model,
            cell_model,
            loss,
            self.info,
            self.device,
            self.diagnostics,
            sets,
            most=self.strategy.most,
        )

    def sampler(self, events: EventWriter | None) -> Sampler | None:
        """Rank 0's; of a model in shards every rank has one, which sends nothing elsewhere."""
        if not self.config.sample.every or not self.strategy.runs_on(self.info.rank):
            return None
        return Sampler(
            model=self.state.model,
            tokenizer=self.plan.tokenizer,
            table=self.config.sample,
            seed=self.config.run.seed,
            cell=self.config.data.seq_len,
            device=self.device,
            autocast=autocast_context(self.config, self.device),
            send=[events.write, self.state.tracker.log_event] if events is not None else [],
        )

    def progress(self, verdict: Callable[[], str] | None) -> Progress:
        progress = Progress(
            is_shown=self.info.is_main and sys.stderr.isatty(),
            total=self.plan.length.total,
            done=self.position.reached,
            name=self.config.run.name,
            verdict=verdict,
        )
        # A guard of its own: a bar that failed is taken off the screen all the same.
        self.stack.callback(self.diagnostics.best_effort("end of the progress bar").run, progress.hide)
        return progress

    def profile(self) -> StepProfile | None:
        """Rank 0's."""
        if not (self.info.is_main and self.config.metrics.profile):
            return None
        profile = StepProfile(
            self.run_dir.path,
            num_steps=self.config.metrics.profile,
            start=self.position.step,
            device=self.device,
            tracker=self.state.tracker,
            guard=self.diagnostics.best_effort("profile"),
        )
        self.stack.callback(profile.close)
        return profile
