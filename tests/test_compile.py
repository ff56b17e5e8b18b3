"""Compiled layers: the same numbers up to rounding, one program a kind, and eager where that cannot be."""

import dataclasses
import shutil
from pathlib import Path

import pytest
import torch
from conftest import write_tiny_checkpoint

from river import compile as compiling
from river import load, programs
from river.checkpoint import load_model
from river.compile import CompiledLayer, compile_model
from river.controller import FixedDepth, Never
from river.decode import Decoder
from river.exits import load_river
from river.model import DecoderLayer

pytestmark = pytest.mark.skipif(not shutil.which("g++") and not shutil.which("clang++"), reason="no C++ compiler")

TEXT = (
    "The river rises in the hills above the town and is at first no more than a ditch. After the mill it "
    "is joined by two streams, and from there on barges of twenty tons can use it. Its water was so clear "
    "that the dyers settled there in 1640; by 1900 it was black. Today you can swim in it again, and on "
    "a summer evening half the town does."
)


@pytest.fixture(scope="module")
def cache_folder(tmp_path_factory):
    """One cache of compiled packages for this file, so that a program is built once."""
    patch = pytest.MonkeyPatch()
    folder = tmp_path_factory.mktemp("cache")
    patch.setenv("XDG_CACHE_HOME", str(folder))
    yield folder / "river-llm"
    patch.undo()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = write_tiny_checkpoint(tmp_path_factory.mktemp("compile") / "tiny", intermediate_size=192)
    model = load_model(folder)
    return model, load_river(model, folder)


@pytest.fixture(scope="module")
def compiled(tiny, cache_folder):
    model, river = tiny
    lines = []
    model, river = compile_model(model, river, lambda line, done: lines.append(line))
    assert not [line for line in lines if "without" in line], lines
    return model, river


IDS = torch.randint(3, 1024, (40,), generator=torch.Generator().manual_seed(5)).tolist()


def teacher_forced(model, river, depth, ids=IDS, max_len=64):
    """Float32 logits [len(ids) - 4, vocab]: the first four ids as a prompt, the rest one at a time."""
    decoder = Decoder(model, river, FixedDepth(depth), "backbone", max_len=max_len)
    rows = [decoder.prefill([ids[:4]])[0]]
    rows += [decoder.decode_one_token(torch.tensor([token]))[0] for token in ids[4:-1]]
    return torch.cat(rows)


def test_what_is_compiled_is_what_is_run(compiled):
    """A fallback on every step would pass all comparisons."""
    model, river = compiled
    assert all(isinstance(layer, CompiledLayer) for layer in model.layers + river)
    assert isinstance(model.lm_head, compiling.CompiledHead)
    calls = []
    layer = CompiledLayer(model.layers[0].plain)
    layer.programs[1] = lambda *args: calls.append(args) or args[0]
    decoder = Decoder(dataclasses.replace(model, layers=[layer] * 4), river, Never(), max_len=64)
    decoder.prefill([IDS[:4]])
    assert not calls, "a prompt goes to the layer as it is written"
    decoder.decode_one_token(torch.tensor([5]))
    assert len(calls) == 4


def test_a_block_of_tokens_is_compiled_and_agrees_with_eager(tiny, compiled, cache_folder, tmp_path, monkeypatch):
    """Verification of drafts: several tokens at once, each of which sees those before it and no later one."""
    shutil.copytree(cache_folder, tmp_path / "river-llm")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    eager = tiny[0]
    fused, _ = compile_model(*tiny)
    assert compiling.compile_blocks(fused, 4) and not compiling.compile_blocks(eager, 4)
    calls = []
    for layer in fused.layers:
        program = layer.programs[4]
        layer.programs[4] = lambda *args, program=program: calls.append(1) or program(*args)
    logits, caches = [], []
    for model in (eager, fused):
        decoder = Decoder(model, tiny[1], Never(), max_len=64)
        decoder.prefill([IDS[:9]])
        for start in (9, 13, 17):
            h, _ = decoder.forward(torch.tensor([IDS[start : start + 4]]), Never())
            logits.append(model.logits(h))
        caches.append(decoder.cache.data[..., : decoder.length, :].float())
    assert len(calls) == 3 * len(fused.layers)
    want, got = torch.cat(logits[:3]), torch.cat(logits[3:])
    assert (want - got).abs().max() < 0.05 * want.abs().max()
    torch.testing.assert_close(*caches, atol=0.05, rtol=0.05)


@pytest.mark.parametrize("depth", (0, 2, 4))
def test_compiled_agrees_with_eager_except_near_ties(tiny, compiled, depth):
    """Fused rounding moves a bfloat16 logit by a little; only a near tie may change its winner by that."""
    eager, fused = teacher_forced(*tiny, depth), teacher_forced(*compiled, depth)
    noise = (eager - fused).abs().max()
    assert noise < 0.05 * eager.abs().max()
    best, second = eager.topk(2).values.t()
    changed = eager.argmax(-1) != fused.argmax(-1)
    assert (best - second)[changed].le(2 * noise).all(), f"{int(changed.sum())} of {len(changed)} changed"
    assert changed.float().mean() < 0.2


def test_the_cache_is_written_as_it_is_by_the_layer(tiny, compiled):
    caches = []
    for model, river in (tiny, compiled):
        decoder = Decoder(model, river, FixedDepth(2), "backbone", max_len=64)
        decoder.prefill([IDS[:4]])
        for token in IDS[4:20]:
            decoder.decode_one_token(torch.tensor([token]))
        caches.append(decoder.cache.data[..., :20, :].float())
    cosine = torch.nn.functional.cosine_similarity(*caches, dim=-1)
    assert cosine.min() > 0.99


def test_five_prompt_lengths_need_no_more_programs(tiny, compiled, cache_folder):
    """Recompiling for a length is how compiled decoders lose what they gain."""
    before = sorted(cache_folder.iterdir())
    for length in (1, 2, 7, 30, 33):
        decoder = Decoder(*compiled, FixedDepth(2), max_len=length + 40)
        decoder.prefill([IDS[:length]])
        decoder.decode_one_token(torch.tensor([7]))
    assert sorted(cache_folder.iterdir()) == before and len(before) == 3


def test_the_second_time_nothing_is_compiled(tiny, compiled, monkeypatch):
    monkeypatch.setattr(torch.export, "export", lambda *args, **kwargs: pytest.fail("compiled again"))
    model, river = tiny
    again = compile_model(model, river)
    assert torch.equal(teacher_forced(*again, 2), teacher_forced(*compiled, 2))


def test_a_batch_and_the_last_slot_go_to_the_layer(tiny, compiled):
    """The program knows one row, and was traced with a slot to spare."""
    for batch, length in ((2, 10), (1, 5)):
        logits = []
        for model, river in (tiny, compiled):
            decoder = Decoder(model, river, FixedDepth(2), "backbone", batch=batch, max_len=length)
            decoder.prefill([IDS[:4]] * batch)
            logits.append(decoder.decode_one_token(torch.tensor([9] * batch))[0])
        torch.testing.assert_close(*logits, atol=0.05 * float(logits[0].abs().max()), rtol=0)


def test_a_damaged_program_is_built_again(tiny, compiled, cache_folder):
    """Loading a library that was cut short does not raise, it ends the process."""
    whole = {path: path.read_bytes() for path in cache_folder.iterdir()}
    flipped = [content[:5000] + bytes([content[5000] ^ 1]) + content[5001:] for content in whole.values()]
    damages = [b"no library", next(iter(whole.values()))[:-100], flipped[-1]]
    for path, damage in zip(whole, damages, strict=True):
        path.unlink()  # not written over: this process has it mapped
        path.write_bytes(damage)
    lines = []
    again = compile_model(*tiny, lambda line, done: lines.append(line))
    assert sum("compiling" in line for line in lines) == 3
    assert torch.equal(teacher_forced(*again, 2), teacher_forced(*compiled, 2))


def test_a_changed_source_or_shape_has_another_package(tiny, monkeypatch):
    """A fork that changes the layer must not run yesterday's program."""
    model, river = tiny
    hidden, table = torch.zeros(1, 1, 64), torch.zeros(1, 1, 1, 16)

    def key(layer=model.layers[0], table=table, scale=None):
        return programs._key(compiling._signature(layer), (hidden, table, scale, []))

    first = key()
    assert first == key(model.layers[1])
    assert first != key(river[0])
    assert first != key(table=torch.zeros(1, 1, 1, 8)), "half of each head rotates: another program, same weights"
    assert first != key(scale=torch.ones(1)), "queries are scaled: one input more"
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    assert first != key()
    monkeypatch.undo()
    read_text = Path.read_text
    for source in ("model.py", "linear.py", "quantize.py", "rope.py", "compile.py", "programs.py"):
        monkeypatch.setattr(
            Path, "read_text", lambda self, **how: read_text(self, **how) + "# changed" * (self.name == source)
        )
        assert first != key(), source


def test_a_field_that_a_fork_adds_to_the_layer_tells_programs_apart(tiny):
    """The signature once listed the fields that counted: two layers that differed in a new one shared a program."""

    @dataclasses.dataclass
    class Gated(DecoderLayer):
        activation: str = "silu"

    layers = [Gated(**vars(tiny[0].layers[0]), activation=name) for name in ("silu", "gelu", "silu")]
    first, second, third = map(compiling._signature, layers)
    assert first != second and first == third


def test_without_a_compiler_it_is_said_once_and_runs_eager(tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(
        torch.export, "export", lambda *a, **k: (_ for _ in ()).throw(RuntimeError("no compiler\nhere"))
    )
    model, river = tiny
    lines = []
    same = compile_model(model, river, lambda line, done: lines.append(line))
    assert [line for line in lines if "without" in line] == [
        "running without --compile: PyTorch cannot compile here (no compiler)"
    ]
    assert same == (model, river)


def test_a_cache_folder_that_others_can_write_to_is_not_trusted(tiny, compiled, tmp_path, monkeypatch):
    """What lies there would be run."""
    folder = tmp_path / "river-llm"
    folder.mkdir()
    folder.chmod(0o777)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    lines = []
    assert compile_model(*tiny, lambda line, done: lines.append(line)) == tiny
    assert len(lines) == 1 and "written to by others" in lines[0]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "river-llm" / "file"))
    (folder / "file").write_text("")
    assert compile_model(*tiny, lambda line, done: lines.append(line)) == tiny and "no cache folder" in lines[1]


def test_nothing_is_left_in_the_temporary_folder(tiny, compiled, tmp_path, monkeypatch):
    """PyTorch's own loader unpacks a package there at each start, and leaves it."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    compile_model(*tiny)
    assert not list(tmp_path.iterdir())


def test_on_other_devices_torch_compile_has_the_same_interface(tiny, monkeypatch):
    """Here on the CPU and uncompiled, which tests the calls and not the speed."""
    model, river = tiny
    monkeypatch.setattr(programs, "_package", lambda *args: pytest.fail("that is the CPU's way"))
    monkeypatch.setattr(torch, "compile", lambda module, dynamic: module)
    monkeypatch.setattr(programs, "_is_cpu", lambda tensor: False)
    other = compile_model(model, river)
    assert isinstance(other[0].layers[0], CompiledLayer)
    torch.testing.assert_close(teacher_forced(*other, 2), teacher_forced(*tiny, 2), atol=0.05, rtol=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("depth", (0, 2, 30))
def test_the_default_model_compiled_chooses_the_same_words(default_model_folder, depth):
    """Of 185 tokens of a real text, teacher-forced, only near ties may change (`-rA` shows how many did)."""
    plain = load(default_model_folder, device="cpu")
    fused = load(default_model_folder, device="cpu", compile=True)
    ids = plain.tokenizer.encode(TEXT * 2)
    eager = teacher_forced(plain.model, plain.river, depth, ids, 256)
    compiled = teacher_forced(fused.model, fused.river, depth, ids, 256)
    best, second = eager.topk(2).values.t()
    changed = eager.argmax(-1) != compiled.argmax(-1)
    # What fused rounding does to the logits of one step, against the gap between the two best of that step.
    noise = (eager - compiled).abs().amax(-1)
    print(f"depth {depth}: {int(changed.sum())} of {len(changed)} changed, largest noise {noise.max():.2f}")
    assert (best - second)[changed].le(2 * noise[changed]).all()
    assert changed.float().mean() < 0.1


@pytest.mark.slow
@pytest.mark.parametrize("quantizer, bits", (("awq", 4), ("hqq", 8), ("awq", 8)))
def test_scaled_inputs_and_eight_bits_compile(quantizer, bits, cache_folder, tmp_path):
    folder = write_tiny_checkpoint(tmp_path / "tiny", intermediate_size=192)
    model = load_model(folder)
    river = load_river(model, folder, quantizer, bits=bits)
    lines = []
    compiled = compile_model(model, river, lambda line, done: lines.append(line))
    assert not [line for line in lines if "without" in line], lines
    eager, fused = teacher_forced(model, river, 0), teacher_forced(*compiled, 0)
    assert (eager - fused).abs().max() < 0.05 * eager.abs().max()


@pytest.mark.slow
@pytest.mark.parametrize("name", ("ministral3", "qwen2", "qwen3", "phi4mini", "mistral_swa", "llama_bias"))
def test_every_kind_of_family_compiles(family_folder, expected, name, cache_folder, tmp_path):
    """Query scaling, biases, head norms, partial rotary; a window that begins to slide goes back to the layer."""
    folder = shutil.copytree(family_folder(name), tmp_path / name)
    model = load_model(folder)
    river = load_river(model, folder)
    lines = []
    log = lambda line, done: lines.append(line)  # noqa: E731
    compiled = compile_model(model, river, log)
    assert not [line for line in lines if "without" in line], lines
    ids = expected(name)["input_ids"].tolist()[:40]
    for depth in (0, 2, 4):
        eager, fused = teacher_forced(model, river, depth, ids), teacher_forced(*compiled, depth, ids)
        assert (eager - fused).abs().max() < 0.1 * eager.abs().max()
