"""Parts of a window between special tokens are tokenised once, and the ids stay the tokenizer's.

The other side of each comparison is the tokenizer's own `encode` of the whole text.
"""

import random

import pytest

pytest.importorskip("sglang")

from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest
from sglang.srt.environ import envs
from test_ranges import conversation
from test_ranges_parts import STYLES, chat_handler, tool
from tokenizers import AddedToken, Tokenizer, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from sam.core.ranges import RangeResolver, Unrenderable
from sam.srt.entrypoints import rendering
from sam.srt.entrypoints.rendering import ChatWindow
from sam.srt.entrypoints.segments import SegmentEncoder

ROLES = ("user", "assistant")
WITH_SPECIALS = [name for name, style in STYLES.items() if style.specials or name == "qwen"]


class Whole(SegmentEncoder):
    """Every text from its beginning to its end."""

    def encode(self, text, **options):
        return self._encode(text, options)


def requests(name, seed):
    rng = random.Random(f"{name}-{seed}")
    messages, tools = conversation(rng, STYLES[name])
    return ChatCompletionRequest(messages=messages, tools=tools, model="m")


def rendered(call, *args):
    try:
        return call(*args)
    except Unrenderable as error:
        return str(error)


def renderings(window, request):
    """All that a resolver may ask of a window; a refusal is an answer, too."""
    n_messages, n_tools = len(request.messages), len(request.tools or ())
    yield rendered(window.full)
    for i in range(n_messages):
        yield rendered(window.messages_before, i)
        yield rendered(window.other_message, i)
    for i in range(n_tools):
        yield rendered(window.tools_before, i)


@pytest.mark.parametrize("name", STYLES)
@pytest.mark.parametrize("seed", range(3))
def test_all_renderings_have_the_ids_of_the_whole_text(name, seed, monkeypatch):
    handler, request = chat_handler(name), requests(name, seed)
    fresh = list(renderings(ChatWindow(handler, request), request))
    known = list(renderings(ChatWindow(handler, request, list(fresh[0])), request))
    monkeypatch.setattr(rendering, "SegmentEncoder", Whole)
    whole = list(renderings(ChatWindow(handler, request), request))
    assert fresh == whole and known == whole


def resolved(name, request, tokens, spans):
    """Spans of a window, and how many characters of it were tokenised for them."""
    window = ChatWindow(chat_handler(name), request, tokens)
    resolver = RangeResolver(
        window, n_messages=len(request.messages), n_tools=len(request.tools or ())
    )
    return [resolver.resolve(*span) for span in spans], window.n_tokenised_chars


def long_request(name):
    style = STYLES[name]
    text = "some words of a long answer " * 120
    turns = [{"role": r, "content": f"{r} {i} {text}"} for i in range(6) for r in ROLES]
    tools = [tool(f"t{i}") for i in range(3)] if style.tools else None
    messages = [*turns, {"role": "user", "content": "last"}]
    return ChatCompletionRequest(messages=messages, tools=tools, model="m")


@pytest.mark.parametrize("name", [name for name in WITH_SPECIALS if name != "countdown"])
def test_two_boundaries_cost_less_than_one_tokenisation_of_the_window(name):
    request = long_request(name)
    window = ChatWindow(chat_handler(name), request)
    tokens = window.full()
    n_window = window.n_tokenised_chars
    assert n_window > envs.SGLANG_PARALLEL_PROMPT_ENCODE_MIN_CHARS.get()
    spans = [("messages", 3, 8), ("messages", 5, 6)]
    if request.tools:
        spans.append(("tools", 1, None))
    with_tokens, n_extra = resolved(name, request, tokens, spans)
    without, n_all = resolved(name, request, None, spans)
    assert with_tokens == without
    assert n_extra < n_window / 4
    assert n_window <= n_all < n_window * 1.25


def test_a_template_without_special_tokens_still_resolves():
    turns = [{"role": r, "content": f"{r} {i}"} for i in range(3) for r in ROLES]
    request = ChatCompletionRequest(messages=turns, model="m")
    (span,), n_chars = resolved("plain", request, None, [("messages", 1, 3)])
    assert 0 < span.start < span.end and n_chars > 0


def test_an_answer_to_go_on_with_is_no_part_of_the_window_s_last_text():
    """Its tokens are put behind those of the text."""
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "It is"}]
    request = ChatCompletionRequest(
        messages=messages, tools=[tool("a"), tool("b")], model="m", continue_final_message=True
    )
    fresh = ChatWindow(chat_handler("qwen"), request)
    tokens = fresh.full()
    known = ChatWindow(chat_handler("qwen"), request, list(tokens))
    assert known.full() == tokens
    assert known.messages_before(1) == fresh.messages_before(1)
    for number in range(2):
        assert known.tools_before(number) == fresh.tools_before(number)


# -- tokenizers --------------------------------------------------------------------------

SPECIALS = ["<s>", "</s>", "<s>>", "[I]", "\u2581"]
PRE_TOKENIZERS = {
    "metaspace": pre_tokenizers.Metaspace(prepend_scheme="first"),
    "metaspace-always": pre_tokenizers.Metaspace(prepend_scheme="always"),
    "bytes": pre_tokenizers.ByteLevel(add_prefix_space=True),
    "none": None,
}


def tokenizer(pre_tokenizer=None, normalizer=None, processor=None, **options):
    """A character model: every difference in what it is given shows in its ids."""
    letters = sorted({*map(chr, range(33, 127)), "\u2581", "\u0120", *"\u00ff\u010a"})
    vocab = {letter: i for i, letter in enumerate(letters)} | {"ab": 500, "[U]": 501}
    backend = Tokenizer(models.BPE(vocab, [("a", "b")], unk_token="[U]"))
    if pre_tokenizer is not None:
        backend.pre_tokenizer = pre_tokenizer
    if normalizer is not None:
        backend.normalizer = normalizer
    backend.add_special_tokens([AddedToken(one, **options) for one in SPECIALS[:4]])
    backend.add_tokens([AddedToken("nn", normalized=True)])
    if processor is not None:
        backend.post_processor = processor(backend)
    return PreTrainedTokenizerFast(tokenizer_object=backend)


@pytest.mark.parametrize("kind", PRE_TOKENIZERS)
@pytest.mark.parametrize("prepend", [False, True])
def test_any_text_has_the_tokenizer_s_own_ids(kind, prepend):
    normalizer = normalizers.Prepend("\u2581") if prepend else None
    real = tokenizer(PRE_TOKENIZERS[kind], normalizer)
    encoder, rng = SegmentEncoder(real), random.Random(kind)
    assert encoder.is_usable
    pieces = ["<s>", "</s>", "[I]", ">", "<", "<s", " ", "ab", "a b ", "nn", "n", "x", "\n", ""]
    for _ in range(300):
        text = "".join(rng.choices(pieces, k=rng.randrange(12)))
        assert encoder.encode(text) == real.encode(text), text
    assert encoder.n_chars


def test_a_part_is_tokenised_once():
    encoder = SegmentEncoder(tokenizer())
    encoder.encode("first<s>second</s>third")
    n_chars = encoder.n_chars
    encoder.encode("first<s>third</s>second[I]second")
    assert encoder.n_chars == n_chars == 23
    encoder.encode("third<s>new")
    assert encoder.n_chars == n_chars + len("third") + len("<s>new")


def with_bos(backend):
    bos = ("<s>", backend.token_to_id("<s>"))
    return processors.TemplateProcessing(single="<s> $A", special_tokens=[bos])


def test_special_tokens_that_the_tokenizer_adds_by_itself():
    real = tokenizer(processor=with_bos)
    encoder = SegmentEncoder(real)
    texts = ["a<s>b", "b<s>a", "<s>"]
    for options in ({}, {"add_special_tokens": True}, {"add_special_tokens": False}) * 2:
        for text in texts:
            assert encoder.encode(text, **options) == real.encode(text, **options)
    assert encoder.encode("a", truncation=True) == real.encode("a", truncation=True)


def test_tokenizers_whose_parts_depend_on_each_other_are_left_alone():
    class Own(PreTrainedTokenizerFast):
        def encode(self, text, **options):
            return [1, 2, 3]

    assert not SegmentEncoder(tokenizer(rstrip=True)).is_usable
    assert not SegmentEncoder(tokenizer(lstrip=True)).is_usable
    assert not SegmentEncoder(tokenizer(single_word=True)).is_usable
    assert not SegmentEncoder(object()).is_usable
    own = Own(tokenizer_object=tokenizer().backend_tokenizer)
    assert not SegmentEncoder(own).is_usable
    padded = tokenizer()
    padded.backend_tokenizer.enable_padding(length=8)
    assert not SegmentEncoder(padded).is_usable
    real = tokenizer(rstrip=True)
    encoder = SegmentEncoder(real)
    for text in ("a<s> b", "a<s>  b", "b<s> b"):
        assert encoder.encode(text) == real.encode(text)


def test_given_tokens_of_another_text_are_not_believed():
    real = tokenizer()
    encoder = SegmentEncoder(real)
    encoder.give([7, 8, 9])
    assert encoder.encode("a<s>b") == [7, 8, 9]
    assert encoder.encode("a<s>b") == real.encode("a<s>b")
    encoder.give([7])
    encoder.give(None)
    assert encoder.encode("b<s>b") == real.encode("b<s>b")
