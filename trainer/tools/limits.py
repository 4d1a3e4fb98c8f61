"""The thresholds of every judgement on a run, before it (`check`) and after it
(`diagnose`, `report`), in one table.

Above each threshold stand its unit and its reason. Those that follow from no formula were set by
calibration: high enough that the healthy runs of `scripts/calibrate_diagnosis.py` raise no alarm,
low enough that its injected faults are found in time (docs/diagnosis.md).
"""

from __future__ import annotations

from typing import Final

# Any rule

# probability: of a false alarm of one statistical rule in one run.
ALPHA: Final = 1e-3
# share of the rules: a run that fewer could judge is not called healthy.
LEAST_JUDGED: Final = 0.5
# learning rate: `check` warns above it, since AdamW moves every weight by about as much per step.
LARGEST_LR: Final = 0.1
# share of the run: a longer warm-up leaves most steps below the configured learning rate.
LONG_WARMUP: Final = 0.5
# share of the learning rate: a smaller jump at a resume is not worth a warning.
RATE_MARGIN: Final = 0.01

# The ledger and carried states

# standard errors: beyond them a loss of gain is not chance, over all buckets that are looked at.
FAR_ERRORS: Final = 4.0
# nats/token: a gain of carrying states that is not worth their memory and time.
WORTHLESS_NATS: Final = 0.005
# evaluations: by the first ones the model has not learned to use its state yet.
MIN_EVALUATIONS: Final = 3
# share of the largest gain: a fall with depth beyond it is no noise of the documents.
LOST_GAIN: Final = 0.5

# Mixing and full rows

# share of the positions of full rows that hold a token: with fewer, a run computes padding.
LOW_FILL: Final = 0.9
# logged rows: the fill of fewer is that of the first batches.
FILL_ROWS: Final = 5
# ratio of the picks of two slices: the reader with fewer waits about so many times longer.
UNEVEN_RATIO: Final = 16.0
# share of the logged rows: single uneven rows are slices about to end.
UNEVEN_SHARE: Final = 0.05
# logged rows: the same in a short run.
UNEVEN_ROWS: Final = 5
# ratio of the batch sizes of a pool: smaller ones are even, larger ones the cause of uneven slices.
EVEN_BATCHES: Final = 2
# picks per slice: a reader that ends sooner spends its time opening files.
CHURN_PICKS: Final = 4.0
# exhausted readers per rank: fewer are the end of an epoch.
CHURN_EVENTS: Final = 20

# The gradient and its noise

# ratio of the batch to the noise scale's lower bound: below, eleven times the least steps or more.
SMALL_BATCH: Final = 0.1
# ratio of the batch to its upper bound: above, five times the least number of tokens or more.
WASTEFUL_BATCH: Final = 4.0
# steps: a noise scale from fewer says more about the first steps than about the batch.
NOISE_STEPS: Final = 20
# documents over the noise scale in rows: at 7 times it is a sixth too high, N / (N - B).
FEW_DOCUMENTS: Final = 7.0
# standard errors: of gns/consistency.
CONSISTENCY_ERRORS: Final = 3.0
# consistency: ranks with slices of one stream differ by their rows; those with the same data do not.
SAME_DATA: Final = 0.02
# consistency: beyond it, other loops clipped or scaled their gradients, or mix kinds of data.
TOO_DIFFERENT: Final = 2.0
# share of the squared gradient: what rounding leaves of the noise between equal micro-batches.
ROUNDING: Final = 1e-6

# The loss

# nats/token: a smaller rise is no finding, however far beyond the noise.
MIN_RISE: Final = 0.1
# logged rows: whose noise is that of now.
SPIKE_WINDOW: Final = 32
# logged rows: whose median is the level before a spike; half of them may be high themselves.
SPIKE_CENTER: Final = 9
# logged rows: in which a rare source shows how high its losses are.
SPIKE_FAR_WINDOW: Final = 128
# logged rows: before the first that may be a spike.
SPIKE_BEFORE: Final = 16
# logged rows: until then a first batch of a source may be as bad as the untrained model.
SPIKE_HISTORY: Final = 30
# standard deviations: of second differences; losses have heavy tails.
SPIKE_SIGMAS: Final = 10.0
# ratio to the largest distance seen so far: a rare source may be a little worse than before.
SPIKE_RANGES: Final = 1.5
# share of the improvement so far: what a spike gives back at least.
SPIKE_GIVEN_BACK: Final = 0.2
# logged rows: spikes that last as long are a new level.
NEW_LEVEL: Final = 8
# logged rows: fewer have neither a beginning nor an end.
DIVERGED_ROWS: Final = 5
# logged rows: the end of a run is a quarter of them, at least and at most so many.
END_ROWS: Final = (3, 16)
# ratio to the first loss: an end above it has diverged whatever the noise.
DOUBLED: Final = 2.0

# Speed, and how the run went

# share of the logged rows: the first steps compile, fill caches and start workers.
WARM_UP_SHARE: Final = 0.05
# share of the time of the steps: waiting for data beyond it is a bottleneck, below it jitter.
DATA_SHARE: Final = 0.15
# share of the wait: that reading takes, or something else took the time.
EXPLAINED_WAIT: Final = 0.5
# share of a step: that the fastest rank waits for the slowest; less is a matter of batches.
STRAGGLE_SHARE: Final = 0.25
# logged rows: after warm-up; a median of fewer is that of single steps.
SPEED_ROWS: Final = 8
# seconds: for which something else may keep a machine busy.
BUSY_SECONDS: Final = 60.0
# share of the steps: repeated after restarts.
REDONE_SHARE: Final = 0.05
# restarts from one step: more are a crash loop, which more checkpoints do not help.
RESTARTS: Final = 2
