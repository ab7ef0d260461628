"""Reasoning that has used up its budget is closed in its place: by masks of one token."""

from __future__ import annotations

import json
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest
import tokenizers
from llguidance import LLMatcher, LLTokenizer

from radix_runtime.config import ServerArgs
from radix_runtime.constraint import Constraint, ReasoningBudget
from radix_runtime.errors import RequestError
from radix_runtime.grammar.llguidance_backend import LlguidanceBackend
from radix_runtime.grammar.reasoning_budget import BudgetKeeper
from radix_runtime.grammar.service import Grammars
from radix_runtime.grammar.source import grammar_source
from radix_runtime.hub import DEMO_MODEL_DIR
from radix_runtime.text.answer_grammar import AnswerGrammar
from radix_runtime.text.reasoning import reasoning_families
from radix_runtime.text.tool_grammar import ToolGrammar
from radix_runtime.text.tool_parsers import tool_parsers
from radix_runtime.text.tools import FunctionSpec, ToolSpec, ToolUse
from tests.runtime.mask_rig import PATIENCE, TOKENIZER, VOCABULARY, MaskRig, ids_of

EVERYTHING = np.full(VOCABULARY.mask_words, 0xFFFFFFFF, np.uint32)
THOUGHT = {
    "deepseek-r1": "one two three four five six",
    "qwen3": "<think>\none two three four five six",
    "glm45": "\n<think>one two three four five six",
    "minimax": "<think>\none two three four ürfünf",
    "gpt-oss": "<|channel|>analysis<|message|>one two three four five six",
}


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def budget_of(family: str, tokens: int, prompt: str = "<|assistant|>") -> ReasoningBudget:
    closing = ids(reasoning_families[family].closing_text)
    return ReasoningBudget(tokens=tokens, family=family, prompt_end=prompt, closing=closing)


def forced(keeper: BudgetKeeper, mask: np.ndarray = EVERYTHING) -> int | None:
    """The token that is left of a mask, None if it is left as it was."""
    row = mask.copy()
    keeper.force(row)
    if np.array_equal(row, mask):
        return None
    (token,) = ids_of(row)
    return token


@pytest.mark.parametrize("family", list(reasoning_families))
def test_open_reasoning_is_closed_at_the_budget(family: str) -> None:
    thought = ids(THOUGHT[family])
    keeper = BudgetKeeper(budget_of(family, len(thought)), VOCABULARY)
    for token in thought:
        assert forced(keeper) is None
        keeper.accept([token])
    closing = ids(reasoning_families[family].closing_text)
    for token in closing:
        assert forced(keeper) == token == forced(keeper)
        keeper.accept([token])
    for token in ids("The answer, of any length."):
        assert forced(keeper) is None
        keeper.accept([token])


BUDGET = 5 + len(ids("<think>\na</think>"))
ANSWER = "The capital of France is Paris, on the Seine, and <think> is a word of an answer. " * 3


@pytest.mark.parametrize(
    ("family", "prompt", "text"),
    [
        ("qwen3", "", ANSWER),
        ("qwen3", "", f"<think>\na\n</think>\n\n{ANSWER}"),
        ("deepseek-r1", "<think>\n", f"a</think>{ANSWER}"),
        ("deepseek-r1", "<think></think>", ANSWER),
        ("gpt-oss", "", f"<|channel|>final<|message|>{ANSWER}"),
    ],
)
def test_what_is_no_reasoning_has_no_budget(family: str, prompt: str, text: str) -> None:
    keeper = BudgetKeeper(budget_of(family, BUDGET, prompt), VOCABULARY)
    assert len(ids(text)) > BUDGET + 10
    for token in ids(text):
        assert forced(keeper) is None
        keeper.accept([token])


def test_reasoning_that_begins_behind_the_budget_is_closed_at_once() -> None:
    keeper = BudgetKeeper(budget_of("qwen3", 1), VOCABULARY)
    opening = ids("<think>")
    assert len(opening) > 1
    for token in opening:
        assert forced(keeper) is None
        keeper.accept([token])
    keeper.accept(ids("x"))
    assert forced(keeper) == ids("\n</think>\n\n")[0]


@pytest.mark.parametrize("text", ["\n", "<", "<think>", "<think>\n", "a"])
@pytest.mark.parametrize(
    ("family", "prompt"), [("deepseek-r1", ""), ("minimax", "<think>\n"), ("qwen3", "<think>")]
)
def test_the_beginning_of_reasoning_counts(family: str, prompt: str, text: str) -> None:
    """Also while nobody knows whether it will be an opening."""
    tokens = ids(text)
    keeper = BudgetKeeper(budget_of(family, len(tokens), prompt), VOCABULARY)
    keeper.accept(tokens)
    for token in ids(reasoning_families[family].closing_text):
        assert forced(keeper) == token
        keeper.accept([token])
    assert keeper.is_done


def test_special_tokens_that_nobody_sees_are_no_reasoning() -> None:
    """<|im_end|>, which the text of an answer does not have, does not hide the opening."""
    (end,) = ids("<|im_end|>")
    assert end in VOCABULARY.special_ids
    keeper = BudgetKeeper(budget_of("qwen3", 3), VOCABULARY)
    keeper.accept([end, *ids("<think>\na")])
    assert forced(keeper) is not None


def test_the_grammar_has_the_last_word() -> None:
    """A closing that it does not let is left where it stops."""
    closing = ids("\n</think>\n\n")
    mask = EVERYTHING.copy()
    mask[closing[1] // 32] &= ~np.uint32(1 << closing[1] % 32)
    keeper = BudgetKeeper(budget_of("deepseek-r1", 1), VOCABULARY)
    keeper.accept(ids("a"))
    assert forced(keeper, mask) == closing[0]
    keeper.accept(closing[:1])
    assert forced(keeper, mask) is None


# The process of masks ---------------------------------------------------------------------------


@pytest.fixture
def rig() -> Iterator[MaskRig]:
    made = MaskRig()
    yield made
    made.masker.close()


@pytest.mark.parametrize("is_killed", [False, True])
def test_masks_of_an_answer_with_a_budget(rig: MaskRig, is_killed: bool) -> None:
    """Any tokens, the closing, any tokens; also of a process that was replaced on the way."""
    constraint = Constraint("any", budget=budget_of("deepseek-r1", 4))
    rig.masker.open(1, constraint, stop_ids=[2], min_tokens=0).result(PATIENCE)
    closing = ids("\n</think>\n\n")
    tokens = [*ids("one two three four")[:4], *closing, *ids("The answer")]
    new: list[int] = []
    for place, token in enumerate(tokens):
        (mask,) = rig.allowed(a1=new)
        is_forced = 4 <= place < 4 + len(closing)
        assert mask == {token} if is_forced else len(mask) > 1000, place
        if is_killed and place in (2, 5):
            rig.kill()
        new = [token]
        is_behind = place >= 4 + len(closing)
        assert bool(rig.masker.take_free()) == is_behind, place
    assert not rig.failures


def test_nothing_is_asked_behind_the_reasoning(rig: MaskRig) -> None:
    """Where a grammar follows, or the end is held back, masks go on."""
    family = reasoning_families["deepseek-r1"]
    writer = AnswerGrammar(family.markers, special_id=lambda text: None)
    budget = budget_of("deepseek-r1", 40)
    free = Constraint("any", budget=budget)
    before = writer.behind(family, "reasoning", family.final)
    bound = Constraint("regex", "a+", before=before, budget=budget)
    rig.masker.open(1, free, stop_ids=[2], min_tokens=0).result(PATIENCE)
    rig.masker.open(2, bound, stop_ids=[2], min_tokens=0).result(PATIENCE)
    rig.masker.open(3, free, stop_ids=[2], min_tokens=40).result(PATIENCE)
    thought = ids("One.\n</think>\n\n")
    rig.allowed(a1=[], a2=[], a3=[])
    assert rig.masker.take_free() == []
    rig.allowed(a1=thought, a2=thought, a3=thought)
    assert rig.masker.take_free() == [1]
    rig.masker.close_answers([1])
    (mask,) = rig.allowed(a3=ids("a") * 40)
    assert 2 in mask and rig.masker.take_free() == [3]


def test_a_grammar_behind_the_reasoning_goes_on_behind_its_budget(rig: MaskRig) -> None:
    family = reasoning_families["deepseek-r1"]
    writer = AnswerGrammar(family.markers, special_id=lambda text: None)
    before = writer.behind(family, "reasoning", family.final)
    budget = budget_of("deepseek-r1", 6)
    constraint = Constraint("regex", "yes|no", before=before, budget=budget)
    rig.masker.open(1, constraint, stop_ids=[2], min_tokens=0).result(PATIENCE)
    dice = np.random.default_rng(0)
    answer: list[int] = []
    while not answer or answer[-1] != 2:
        (mask,) = rig.allowed(a1=answer[-1:])
        answer.append(int(dice.choice(sorted(mask))))
        assert len(answer) < 60
    thought = answer[: -1 - len(ids("\n</think>\n\nyes"))]
    assert len(thought) <= 6
    text = TOKENIZER.decode(answer, skip_special_tokens=True)
    assert text.endswith(("\n</think>\n\nyes", "\n</think>\n\nno"))


def test_forced_calls_of_gpt_oss_follow_its_budget(rig: MaskRig) -> None:
    """In place of the final message that closes its reasoning elsewhere."""
    family = reasoning_families["gpt-oss"]
    parser = tool_parsers.get("gpt-oss")
    form = parser.form_for("")
    assert form is not None
    schema = {"properties": {"exact": {"type": "boolean"}}, "required": ["exact"]}
    tool = ToolSpec(type="function", function=FunctionSpec(name="f", parameters=schema))
    use = ToolUse(tools=[tool], mode="required", is_parallel=False)
    text = ToolGrammar(form, parser.markers, special_id=lambda text: None).required(use)
    writer = AnswerGrammar(family.markers, special_id=lambda text: None)
    before = writer.behind(family, "optional", final="")
    opening = ids(family.opening)
    budget = budget_of("gpt-oss", len(opening) + 4)
    constraint = Constraint("lark", text, before=before, budget=budget)
    rig.masker.open(1, constraint, stop_ids=[2], min_tokens=0).result(PATIENCE)
    (mask,) = rig.allowed(a1=opening)
    dice = np.random.default_rng(0)
    answer = [*opening, int(dice.choice(sorted(mask)))]
    while answer[-1] != 2:
        (mask,) = rig.allowed(a1=answer[-1:])
        answer.append(int(dice.choice(sorted(mask))))
        assert len(answer) < 120
    end = (
        "<|end|><|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
    )
    written = TOKENIZER.decode(answer, skip_special_tokens=True)
    thought, found, call = written.partition(end)
    assert found and len(ids(thought)) <= budget.tokens
    assert call in ('{"exact": true}', '{"exact": false}')


def test_a_server_without_grammars_closes_no_reasoning() -> None:
    grammars = Grammars(ServerArgs(grammar_backend="none"), TOKENIZER, vocab_size=1536, eos_ids=[2])
    constraint = Constraint("any", budget=budget_of("qwen3", 1), param="thinking.budget_tokens")
    with pytest.raises(RequestError, match="--grammar-backend none") as refused:
        grammars.check(constraint)
    assert refused.value.param == "thinking.budget_tokens"


# What comes before a grammar --------------------------------------------------------------------


def special(family: str) -> tokenizers.Tokenizer:
    """The demo model's tokenizer, with the family's markers as special tokens."""
    found = tokenizers.Tokenizer.from_file(str(DEMO_MODEL_DIR / "tokenizer.json"))
    found.add_special_tokens(list(reasoning_families[family].markers))
    return found


INTEGER = Constraint("json_schema", '{"type": "integer"}')
SENTENCE = Constraint("regex", r"\s*[^.]+\.")
TAG = {"begin": "<f>", "content": {"type": "regex", "pattern": "[0-9]"}, "end": "</f>"}
TAGGED = Constraint(
    "structural_tag",
    json.dumps(
        {
            "format": {
                "type": "triggered_tags",
                "triggers": ["<f>"],
                "tags": [TAG],
                "at_least_one": True,
            }
        }
    ),
)


@pytest.mark.parametrize("has_special", [False, True])
@pytest.mark.parametrize(
    ("family", "start", "body", "good", "bad"),
    [
        ("qwen3", "optional", INTEGER,
         ["7", "<think>\na {\n</think>\n\n7", "<think></think>7", "\n<think>a</think>\n7"],
         ["a7", "<think>a", "<think>a</think>b"]),
        ("qwen3", "reasoning", INTEGER,
         ["\n</think>\n\n7", "a 7 b</think>7"], ["7", "a</think>b"]),
        ("glm45", "optional", INTEGER,
         ["7", "\n<think>a</think>\n7", " \n<think>a</think>7"], ["\n<think>7", "<think>7"]),
        # Bodies that could begin with the opening themselves.
        ("qwen3", "optional", SENTENCE,
         ["One.", "\n\n\n\n\nOne.", "<thin>.", "<think>\na. b\n</think>\n\nOne.",
          "\n\n \n<think>a</think>One."],
         ["<think>\nOne.", "\n<think>\nOne.", "<think>a</think>One", "<think>a.</think>"]),
        ("qwen3", "optional", TAGGED,
         ["<f>7</f>", "a <f>7</f> b", "<think>\n<f>8</think><f>7</f>a"],
         ["no tag", "<think>\n<f>7</f></think>\n\nno tag", "\n<think>\n<f>7</f>"]),
        (
            "gpt-oss", "optional", INTEGER,
            ["<|channel|>final<|message|>7",
             "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>7"],
            ["7", "<|channel|>final<|message|>a",
             "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>b"],
        ),
    ],
)  # fmt: skip
def test_what_comes_before_a_grammar(
    family: str,
    start: str,
    body: Constraint,
    good: list[str],
    bad: list[str],
    has_special: bool,
) -> None:
    """Reasoning or none, and then the grammar, whether markers are tokens or texts."""
    if has_special:
        tokenizer = special(family)
    else:
        tokenizer = tokenizers.Tokenizer.from_file(str(DEMO_MODEL_DIR / "tokenizer.json"))
    added = {token.content: i for i, token in tokenizer.get_added_tokens_decoder().items()}
    form = reasoning_families[family]
    writer = AnswerGrammar(form.markers, special_id=added.get)
    before = writer.behind(form, start, form.final)  # type: ignore[arg-type]
    constraint = msgspec.structs.replace(body, before=before)
    grammar = grammar_source(constraint, set(added)).text
    guide = LLTokenizer(tokenizer.to_str())
    for text in [*good, *bad]:
        matcher = LLMatcher(guide, grammar, log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        tokens = tokenizer.encode(text, add_special_tokens=False).ids
        follows = matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()
        assert follows == (text in good), text


def test_a_grammar_that_is_refused_is_refused_behind_reasoning() -> None:
    """It shows only where it begins how much it asks for, and there reasoning comes first."""
    rules = 1_500
    lines = [f'r{i}: "a"? r{(i * 7 + 1) % rules}' for i in range(rules)]
    start = "start: " + " ".join(f"r{i}" for i in range(rules))
    constraint = Constraint("lark", "\n".join([start, *lines]))
    form = reasoning_families["deepseek-r1"]
    writer = AnswerGrammar(form.markers, special_id=lambda text: None)
    compiler = LlguidanceBackend(VOCABULARY, 0)
    for before in ("", writer.behind(form, "reasoning", form.final)):
        with pytest.raises(RequestError, match="Too many items") as caught:
            compiler.compile(msgspec.structs.replace(constraint, before=before))
        assert caught.value.code == "grammar_too_complex"
