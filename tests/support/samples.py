"""One sample of every message kind, with every field set: for golden bytes and round trips."""

from __future__ import annotations

from protocol.arrays import Float32, Int32, UInt8
from protocol.errors import ErrorInfo
from protocol.grammar import (
    Either,
    Grammar,
    Json,
    Pattern,
    Repeat,
    Rule,
    Rules,
    Sequence,
    Text,
    Thinking,
    ThinkingBudget,
    Until,
)
from protocol.messages import (
    Abort,
    Accepted,
    Drain,
    Generate,
    Gone,
    Goodbye,
    Hello,
    Limits,
    Message,
    Output,
    Outputs,
    Ping,
    Pong,
    Refused,
    TokenLogprobs,
    Usage,
    Welcome,
)
from protocol.model_card import ModelCard, SamplingDefaults
from protocol.sampling import SamplingParams
from protocol.stats import EngineStats
from protocol.steps import (
    Logprobs,
    Masks,
    SlotInit,
    StepPlan,
    StepResult,
    Stop,
    WorkerFailed,
    WorkerReady,
)

PARAMS = SamplingParams(
    max_tokens=7,
    min_tokens=2,
    temperature=0.5,
    top_p=0.75,
    top_k=40,
    min_p=0.25,
    frequency_penalty=0.5,
    presence_penalty=-0.5,
    repetition_penalty=1.5,
    seed=-3,
    stop_token_ids=[11],
    ignore_eos=True,
    logit_bias={5: -1.5},
    logprobs=2,
    prompt_logprobs=1,
    bad_words=[[12, 13], [14]],
    allowed_token_ids=[15, 16],
    logprob_token_ids=[17],
)
GRAMMAR = Grammar(
    body=Rules(
        start=Sequence([Text("<call>"), Repeat(Rule("part"), 1, 2), Until("</call>", "[a-z]*")]),
        rules={"part": Either([Json("x"), Pattern("a+")])},
        schemas={"x": "{}"},
    ),
    before="<",
    after=">",
    thinking=Thinking(opens="<think>", closes="</think>", inside=True, optional=True),
    budget=ThinkingBudget(most=9, opens=["<think>"], closes=["</think>"], inside=True),
)
CARD = ModelCard(
    name="tiny",
    architecture="LlamaForCausalLM",
    digest="ab12",
    vocab_size=97,
    context_tokens=512,
    tokenizer=b'{"model":{}}',
    eos_token_ids=[2, 3],
    bos_token_id=1,
    pad_token_id=0,
    special_tokens={"bos_token": "<s>"},
    chat_template="{{ messages }}",
    defaults=SamplingDefaults(
        temperature=0.5, top_p=0.75, top_k=20, min_p=0.25, repetition_penalty=1.5
    ),
    response_template='{"fields": {}}',
    dtype="bfloat16",
    num_parameters=1000,
    weights_bytes=2000,
    license="apache-2.0",
)
ERROR = ErrorInfo(code="overloaded", message="later", param="prompt", retry_after_s=2.5)
STATS = EngineStats(
    running=1,
    waiting=2,
    waiting_tokens=3,
    free_blocks=4,
    total_blocks=5,
    clients=6,
    num_steps=7,
    num_accepted=8,
    num_refused=9,
    num_finished={"stop": 10},
    num_prompt_tokens=11,
    num_cached_tokens=12,
    num_generated_tokens=13,
    num_preemptions=14,
    num_wire_errors=15,
    busy_s=16.5,
)
LOGPROBS = Logprobs(
    rows=Int32.of([0]),
    counts=Int32.of([2]),
    ids=Int32.of([9]),
    logprobs=Float32.of([-0.5]),
    ranks=Int32.of([1]),
    top_ids=Int32.of([9, 8], (1, 2)),
    top_logprobs=Float32.of([-0.5, -1.5], (1, 2)),
    asked_counts=Int32.of([1]),
    asked=Float32.of([-2.5], (1, 1)),
)

MESSAGES: list[Message] = [
    Hello(protocol=1, name="gateway", pid=42),
    Generate(
        request=1,
        prompt=Int32.of([5, 6]),
        params=PARAMS,
        namespace="key",
        priority=-1,
        grammar=GRAMMAR,
    ),
    Abort(requests=[1, 2]),
    Drain(),
    Ping(),
    Goodbye(),
    Welcome(
        protocol=1,
        epoch="e1",
        model=CARD,
        limits=Limits(
            max_len=512,
            max_slots=8,
            block_tokens=16,
            num_blocks=33,
            token_budget=64,
            prefix_cache=True,
        ),
    ),
    Accepted(request=1),
    Refused(request=1, error=ERROR),
    Outputs(
        step=3,
        outputs=[
            Output(
                request=1,
                tokens=[9],
                logprobs=[TokenLogprobs(9, -0.5, 1, [9, 8], [-0.5, -1.5], [-2.5])],
                prompt_logprobs=[TokenLogprobs(6, -2.5, 3)],
                finish="stop",
                stop_token=9,
                usage=Usage(prompt_tokens=2, generated_tokens=1, cached_tokens=16, preemptions=1),
                error=ERROR,
            )
        ],
    ),
    Pong(epoch="e1", stats=STATS),
    Gone(error=ERROR),
    StepPlan(
        step=3,
        release=Int32.of([2]),
        bind=[
            SlotInit(
                slot=1,
                generation=4,
                tokens=Int32.of([5, 6]),
                prompt_tokens=2,
                num_computed=0,
                blocks=Int32.of([7]),
                seed=-3,
                stop_ids=[2, 3],
                params=PARAMS,
            )
        ],
        block_slots=Int32.of([0]),
        block_indexes=Int32.of([1]),
        block_ids=Int32.of([8]),
        zero_blocks=Int32.of([7, 8]),
        row_slots=Int32.of([0, 1]),
        row_starts=Int32.of([16, 0]),
        row_tokens=Int32.of([1, 2]),
        row_samples=UInt8.of([1, 1]),
        num_decodes=1,
        masked=Int32.of([0]),
    ),
    Masks(step=3, bits=Int32.of([7, -1, 0, 1], (1, 4))),
    StepResult(
        step=3,
        tokens=Int32.of([9, 10]),
        failed=Int32.of([1]),
        logprobs=LOGPROBS,
        prompt_logprobs=LOGPROBS,
        compute_s=0.25,
    ),
    WorkerReady(
        model=CARD,
        max_len=512,
        max_slots=8,
        block_tokens=16,
        num_blocks=33,
        rank=1,
        phases=[("load weights", 0.5)],
    ),
    WorkerFailed(message="out of memory", rank=1),
    Stop(),
]
