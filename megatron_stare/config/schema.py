"""The configuration of a run, one class a component.

A field lives with the component that reads it. Everything that can be judged
from the values alone is judged here; what needs the disk or the model
(missing files, heads that TP does not divide) is judged in `checks.py`.
Errors name the key, the value and what is allowed.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class Section(BaseModel):
    """A part of the configuration: unknown keys are errors, values are never silently converted."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


class RunSection(Section):
    """What the run is called, how long it lasts and where it keeps its files."""

    name: str = Field("run", min_length=1)
    dir: str | None = Field(None, description="run directory; default runs/NAME")
    seed: int = Field(0, ge=0)
    steps: int = Field(100, ge=1)
    grace_seconds: float = Field(
        120.0, gt=0, description="time to save after SIGTERM or Ctrl-C before processes are ended"
    )
    restarts: int = Field(
        3, ge=0, description="of the trainer ranks in a row, without a finished step between them"
    )
    hang_factor: float = Field(
        20.0, gt=1, description="a step that takes this many times the median is taken for hung"
    )
    hang_seconds: float = Field(900.0, gt=0, description="and no step is before it took this long")


class ResumeSection(Section):
    """Whether and how a run directory's run is continued. See docs/reliability.md."""

    mode: Literal["never", "auto"] = Field(
        "never", description="auto: continue from the last good checkpoint in the run directory"
    )
    allow: list[str] = Field(
        default_factory=list, description="keys that may differ from the checkpoint's config: optimizer.lr"
    )



class ModelSection(Section):
    """The Hugging Face directory that training starts from."""

    path: str
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    vocab_multiple: int = Field(128, ge=1, description="the vocabulary is padded to this times tp")
    layers: Literal["auto", "local", "transformer_engine"] = Field(
        "auto", description="auto: transformer_engine on a GPU, local elsewhere"
    )
    fp8: Literal["none", "delayed", "tensorwise", "blockwise", "mxfp8"] = Field(
        "none", description="recipe of the layers' matrix products; needs a GPU and Transformer Engine"
    )
    fp8_keep_ends: int = Field(0, ge=0, description="layers at either end that stay in bfloat16")
    fp8_parameters: bool = Field(
        False, description="keep parameters in FP8 too, so that replicas gather half the bytes"
    )


class ParallelSection(Section):
    """Sizes of Megatron's process groups. Data parallelism takes the ranks that are left."""

    world_size: int | None = Field(
        None, ge=1, description="trainer ranks of the whole job; default: GPUs left by servers, or tp*pp*cp"
    )
    tp: int = Field(1, ge=1)
    pp: int = Field(1, ge=1)
    vpp: int | None = Field(None, ge=2, description="virtual pipeline stages a rank")
    cp: int = Field(1, ge=1)
    ep: int = Field(1, ge=1)
    sequence_parallel: bool = False
    distributed_optimizer: bool = False
    overlap: bool = Field(False, description="overlap gradient reduction with the backward pass")
    recompute: Literal["none", "full", "selective"] = "none"
    optimizer_offload: float = Field(
        0.0, ge=0, le=1, description="share of the optimizer's state kept in the host's memory; needs CUDA"
    )
    expert_balance: float = Field(
        0.0, ge=0, description="of an auxiliary loss that spreads tokens over experts; 0: none, usual in RL"
    )
    timeout_minutes: float = Field(60.0, gt=0, description="limit of one collective")

    @model_validator(mode="after")
    def _compatible(self) -> ParallelSection:
        if self.sequence_parallel and self.tp == 1:
            raise ValueError("sequence_parallel=true needs tp > 1")
        if self.optimizer_offload and not self.distributed_optimizer:
            raise ValueError(
                f"optimizer_offload={self.optimizer_offload} needs distributed_optimizer=true"
            )
        if self.vpp is not None and self.pp == 1:
            raise ValueError(f"vpp={self.vpp} needs pp > 1")
        if self.world_size is not None and self.world_size % self.model_size:
            raise ValueError(
                f"world_size={self.world_size} is not a multiple of tp*pp*cp={self.model_size}"
            )
        return self

    @property
    def groups(self) -> dict[str, Any]:
        """What `engine.parallel.initialize` takes from here: the sizes of Megatron's process groups."""
        return self.model_dump(include={"tp", "pp", "vpp", "cp", "ep", "sequence_parallel"})

    @property
    def model_size(self) -> int:
        """Ranks that share one copy of the model."""
        return self.tp * self.pp * self.cp


class BatchSection(Section):
    """How many responses a step trains on, and how they are packed."""

    prompts_per_step: int = Field(64, ge=1)
    responses_per_prompt: int = Field(8, ge=1)
    updates_per_step: int = Field(1, ge=1, description="optimizer updates a step; 1 is on-policy")
    max_tokens_per_microbatch: int = Field(8192, ge=1)


class OptimizerSection(Section):
    """Adam and its learning-rate schedule."""

    lr: float = Field(1e-6, gt=0)
    min_lr: float = Field(0.0, ge=0)
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = Field(0, ge=0)
    weight_decay: float = Field(0.0, ge=0)
    beta1: float = Field(0.9, ge=0, lt=1)
    beta2: float = Field(0.95, ge=0, lt=1)
    eps: float = Field(1e-8, gt=0)
    clip_grad: float = Field(1.0, ge=0, description="largest gradient norm; 0 turns clipping off")
    skip_grad_norm: float = Field(
        0.0, ge=0, description="an update with a larger norm is skipped, as NaN always is; 0: no limit"
    )
    max_skipped: int = Field(5, ge=1, description="skipped updates in a row that stop the run")

    @model_validator(mode="after")
    def _compatible(self) -> OptimizerSection:
        if self.min_lr > self.lr:
            raise ValueError(f"min_lr={self.min_lr} is above lr={self.lr}")
        return self


class AlgorithmSection(Section):
    """The policy objective: advantages, loss, normalization, and what steers them. See docs/objectives.md."""

    advantage: Literal["grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "w_reinforce"] = (
        "grpo"
    )
    positive_weight: float = Field(0.1, ge=0, description="lambda of w_reinforce")
    loss: Literal["ppo_clip", "gspo", "gspo_token", "cispo", "unclipped"] = "ppo_clip"
    normalization: Literal["token_mean", "sequence_mean", "dr_grpo"] = "token_mean"
    clip_low: float = Field(0.2, ge=0, le=1)
    clip_high: float = Field(0.28, ge=0)
    dual_clip: float | None = Field(10.0, gt=1, description="bound of the ratio where A < 0")
    kl_coef: float = Field(0.0, ge=0, description="of the KL to the run's first model; 0: none is kept")
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    entropy_coef: float = Field(0.0, ge=0, description="of an entropy bonus")
    correction: Literal["none", "truncate", "mask"] = Field(
        "none", description="importance ratio between trainer and sampler: truncated or masked"
    )
    correction_level: Literal["token", "sequence"] = "token"
    correction_cap: float = Field(2.0, gt=0)
    correction_floor: float = Field(0.0, ge=0, description="of mask")
    entropy_control: Literal["none", "entropy_advantage", "top_entropy", "clip_cov", "kl_cov"] = "none"
    control_args: dict[str, float] = Field(default_factory=dict, description="arguments of entropy_control")
    dynamic_sampling: bool = Field(
        False, description="drop groups whose rewards are all equal and sample on"
    )
    max_sampling_rounds: int = Field(8, ge=1, description="limit of dynamic sampling")


class StareSection(Section):
    """STARE (arXiv 2606.19236): rule, gate and schedule. Defaults are the paper's. See docs/concepts.md."""

    enabled: bool = True
    rule: Literal["o1", "c2", "four_quadrant", "custom"] = "o1"
    W: float = Field(1.1, ge=1)
    M: float = Field(0.9, gt=0, le=1)
    M_low: float = Field(0.9, gt=0, le=1, description="of four_quadrant: low surprisal, positive advantage")
    weights: dict[str, float] = Field(
        default_factory=dict,
        description="of custom: high_positive, low_positive, high_negative, low_negative; 1 where not named",
    )
    pool: Literal["per_sign", "all"] = Field("per_sign", description="of custom: what is ranked together")
    top_fraction: float = Field(0.1, gt=0, le=1)
    threshold_ema: float = Field(
        0.0, ge=0, lt=1, description="weight of the old thresholds, for small batches; 0: each step's own"
    )
    gate: Literal["target", "intensity", "band", "off"] = Field("target", description="off: always open")
    target_entropy: float | Literal["auto"] = Field(0.3, description="nats, above 0, or auto")
    auto_steps: int = Field(10, ge=1, description="of auto: steps that are measured")
    auto_fraction: float = Field(0.5, gt=0, le=1, description="of auto: of the measured entropy")
    H_min: float | None = Field(None, gt=0, description="of intensity and band; default: 2/3 of the target")
    H_max: float | None = Field(None, gt=0, description="default: 5/3 of the target")
    g_min: float = Field(0.5, gt=0, le=1, description="of band: factor of all advantages below it")
    g_max: float = Field(1.2, ge=1, description="of band: above it")
    ramp: float | None = Field(None, gt=0, description="of band: nats over which the factor changes")
    schedule: Literal["fixed", "sign", "pi"] = "fixed"
    alpha: float = Field(0.01, gt=0)
    W_max: float = Field(1.5, ge=1)
    W_min: float = Field(
        1.0, gt=0, le=1, description="smallest W of `pi`: below 1 it also lowers an entropy above the target"
    )
    M_min: float = Field(0.5, gt=0, le=1)
    kp: float = Field(4.0, ge=0)
    ki: float = Field(0.5, ge=0)
    smoothing: float = Field(0.7, ge=0, lt=1, description="weight of the old value in smoothed entropy")

    @property
    def target(self) -> float | None:
        """Nats that gate or schedule steer towards; None where neither does, or they are measured."""
        steers = self.enabled and (self.gate != "off" or self.schedule != "fixed")
        return self.target_entropy if steers and self.target_entropy != "auto" else None

    @model_validator(mode="after")
    def _compatible(self) -> StareSection:
        if self.target_entropy != "auto" and not self.target_entropy > 0:
            raise ValueError(f"target_entropy={self.target_entropy} is not above 0; or use auto")
        if self.schedule != "fixed" and self.W_max < self.W:
            raise ValueError(f"W={self.W} is above W_max={self.W_max}")
        if self.schedule != "fixed" and self.M_min > self.M:
            raise ValueError(f"M={self.M} is below M_min={self.M_min}")
        return self


class RolloutSection(Section):
    """SGLang servers and how they are asked."""

    servers: int = Field(1, ge=1, description="SGLang servers that the run starts")
    endpoints: list[str] = Field(
        default_factory=list, description="URLs of servers already running; none are started then"
    )
    router: bool = Field(True, description="put sglang-router in front of the servers")
    tp: int = Field(1, ge=1, description="tensor parallelism of a server")
    first_gpu: int | None = Field(
        None, ge=0, description="first GPU of the servers; default: they take the node's last ones"
    )
    host: str = "127.0.0.1"
    port: int | None = Field(None, ge=1, le=65535, description="router's port; default: a free one")
    temperature: float = Field(1.0, gt=0)
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(-1, ge=-1)
    min_p: float = Field(0.0, ge=0, le=1)
    max_response_tokens: int = Field(1024, ge=1)
    context_length: int = Field(4096, ge=2)
    max_running_requests: int = Field(256, ge=1)
    max_total_tokens: int | None = Field(None, ge=1, description="KV cache of a server, in tokens")
    memory_fraction: float = Field(0.8, gt=0, lt=1, description="share of a GPU's memory for a server")
    threads: int = Field(1, ge=1, description="CPU threads of a server")
    model_path: str | None = Field(None, description="model that servers start with; default: model.path")
    sync: Literal["distributed", "disk"] = "distributed"
    wire: Literal["trainer", "fp8_blockwise"] = Field(
        "trainer", description="form of the weights that servers get; fp8_blockwise needs such a model_path"
    )
    bucket_mb: int = Field(512, ge=1, description="largest piece of a distributed weight update")
    start_timeout: float = Field(600.0, gt=0, description="seconds until a server must be ready")
    request_timeout: float = Field(1800.0, gt=0, description="seconds until a request must be answered")
    outage_timeout: float = Field(
        600.0, gt=0, description="seconds to wait for any server to answer before the run gives up"
    )
    server_restarts: int = Field(10, ge=0, description="of one server or the router, over the whole run")
    health_timeout: float = Field(
        60.0, gt=0, description="seconds without an answer to a health check until a server is restarted"
    )
    seeded: bool = Field(
        False, description="responses follow from run.seed, step and prompt alone; sampling is slower"
    )
    server_args: dict[str, Any] = Field(default_factory=dict, description="further SGLang arguments")

    @model_validator(mode="after")
    def _trainable(self) -> RolloutSection:
        cuts = {"top_p": (self.top_p, 1.0), "min_p": (self.min_p, 0.0)}
        for key, (value, off) in cuts.items():
            if value != off:
                raise ValueError(f"{key}={value} is refused: {_CUT_REASON}; only {key}={off:g} is allowed")
        if self.top_k not in (-1, 0):
            raise ValueError(f"top_k={self.top_k} is refused: {_CUT_REASON}; only top_k=-1 is allowed")
        if self.max_response_tokens >= self.context_length:
            raise ValueError(
                f"max_response_tokens={self.max_response_tokens} leaves no room for a prompt "
                f"in context_length={self.context_length}"
            )
        return self


_CUT_REASON = (
    "SGLang reports log-probs of the whole distribution while sampling from a cut one, "
    "so the importance ratio would be biased"
)


class TaskSection(Section):
    """Where prompts come from, how they are shown to the model, how responses are scored."""

    source: str = Field(
        "", description="a .jsonl or .parquet file, reasoning_gym:NAME, or package.module:function"
    )
    source_args: dict[str, Any] = Field(
        default_factory=dict, description="further arguments of reasoning_gym:NAME or the function"
    )
    size: int = Field(10_000, ge=1, description="rows of a procedural task")
    prompt_key: str = Field(
        "prompt", description="column with text or chat messages; dots reach into it: extra_info.question"
    )
    answer_key: str = Field(
        "answer",
        description="column with the answer; where `answer` is missing, verl's reward_model.ground_truth",
    )
    system_prompt: str | None = Field(None, description="put first, in place of the rows' own")
    chat_template: bool = Field(
        True, description="false: the prompt is plain text, encoded without any special token added"
    )
    reward: str = Field("exact", description="exact, math, reasoning_gym, or package.module:function")
    reward_timeout: float = Field(10.0, gt=0, description="seconds one reward may take, then it is 0")
    reward_workers: int = Field(2, ge=1, description="processes that compute rewards")
    max_prompt_tokens: int = Field(1024, ge=1)
    overlong: Literal["error", "drop"] = Field("error", description="what to do with longer prompts")
    shuffle: bool = Field(True, description="another order in each epoch; false: the rows' own order")

    @model_validator(mode="after")
    def _compatible(self) -> TaskSection:
        if self.system_prompt is not None and not self.chat_template:
            raise ValueError("system_prompt needs chat_template=true")
        if ":" not in self.reward and self.reward not in _REWARDS:
            raise ValueError(
                f"reward={self.reward} is not one of {', '.join(_REWARDS)} or package.module:function"
            )
        if self.reward == "reasoning_gym" and self.source and not self.source.startswith("reasoning_gym:"):
            raise ValueError(f"reward=reasoning_gym needs source=reasoning_gym:NAME, not {self.source}")
        return self


_REWARDS = ("exact", "math", "reasoning_gym")


class EvaluationSection(Section):
    """Sampling for measurement only: mean reward, pass@k, distinct right answers."""

    every: int = Field(0, ge=0, description="steps between evaluations; 0: only where asked for")
    at_end: bool = False
    prompts: int = Field(32, ge=1)
    samples: int = Field(16, ge=1, description="responses a prompt")
    source: str | None = Field(None, description="default: the task's own source with another seed")


class CheckpointSection(Section):
    """Megatron distributed checkpoints in RUN/checkpoints, and Hugging Face exports."""

    every: int = Field(0, ge=0, description="steps between checkpoints; 0: only at the end")
    at_end: bool = True
    keep_last: int = Field(2, ge=1)
    keep_every: int = Field(0, ge=0, description="keep those of every so many steps for good; 0: none")
    background: bool = Field(True, description="write while training goes on")
    journal: bool = Field(
        True, description="keep each step's rollouts, so that a resumed run does not sample them again"
    )
    hf_every: int = Field(0, ge=0, description="write RUN/hf-steps/step_N every so many steps; 0: never")
    hf_at_end: bool = Field(False, description="write RUN/hf at the end")


class ReportSection(Section):
    """Where metrics go. JSONL and the console are always on."""

    tensorboard: bool = True
    wandb: bool = False
    wandb_project: str = "megatron_stare"
    plot_every: int = Field(10, ge=0, description="steps between updates of entropy.png; 0: at the end")


class Config(Section):
    """A whole run."""

    objective: Literal["rl", "sft"] = "rl"
    run: RunSection = RunSection()
    resume: ResumeSection = ResumeSection()
    model: ModelSection
    parallel: ParallelSection = ParallelSection()
    batch: BatchSection = BatchSection()
    optimizer: OptimizerSection = OptimizerSection()
    algorithm: AlgorithmSection = AlgorithmSection()
    stare: StareSection = StareSection()
    rollout: RolloutSection = RolloutSection()
    task: TaskSection = TaskSection()
    evaluation: EvaluationSection = EvaluationSection()
    checkpoint: CheckpointSection = CheckpointSection()
    report: ReportSection = ReportSection()

    @model_validator(mode="after")
    def _compatible(self) -> Config:
        if not self.task.source:
            raise ValueError(
                "task.source is missing: name a file, reasoning_gym:NAME or package.module:function"
            )
        batch = self.batch
        if self.objective == "rl":
            if batch.responses_per_prompt < 2:
                raise ValueError(
                    f"batch.responses_per_prompt={batch.responses_per_prompt}: "
                    f"{self.algorithm.advantage} compares responses to one prompt and needs at least 2"
                )
            longest = self.task.max_prompt_tokens + self.rollout.max_response_tokens
            if longest > self.rollout.context_length:
                raise ValueError(
                    f"task.max_prompt_tokens={self.task.max_prompt_tokens} + "
                    f"rollout.max_response_tokens={self.rollout.max_response_tokens} is above "
                    f"rollout.context_length={self.rollout.context_length}"
                )
        if batch.prompts_per_step % batch.updates_per_step:
            raise ValueError(
                f"batch.updates_per_step={batch.updates_per_step} does not divide "
                f"batch.prompts_per_step={batch.prompts_per_step}"
            )
        return self
