"""The page's engine sees what Python sees: energies, forces, logits, next tokens, landscapes."""

import pytest
import torch

from nrgpt import zoo
from nrgpt.data.tokenizer import SymbolTokenizer
from nrgpt.dynamics.altered import altered
from nrgpt.dynamics.answers import Answers
from nrgpt.dynamics.field import Field
from nrgpt.dynamics.landscape import TokenLandscape, minimise
from nrgpt.dynamics.survey import REACH
from nrgpt.explore.weights import NotForThePage, describe, shortest
from nrgpt.model.energy.feedforward import FF1
from nrgpt.train.runs import load_run

from ..models import (
    BLOCKS,
    COUPLINGS,
    DESCENDING,
    FEEDFORWARDS,
    MASKS,
    NORMS,
    RATES,
    config,
    randomised,
)
from .engine import Engine, agree, differences, states_first

PARTS = [
    *FEEDFORWARDS,
    *DESCENDING,
    *({"mask": mask, "coupling": coupling} for mask in MASKS for coupling in COUPLINGS),
    *({"mask": "inclusive", "safeguard": "cone", "feedforward": "ff2w", "norm": n} for n in NORMS),
    {"feedforward": "memory", "safeguard": "cone", "margin": 0.1},
    *({"rate": rate} for rate in RATES),
    *(
        {"rate": "state", "norm": norm, "safeguard": "cone", "feedforward": "memory"}
        for norm in NORMS
    ),
    {"prelude": 2, "prelude_block": "shared", "rate": "gamma_per_step", "coupling": "full"},
    *({"norm": norm, "rate": "psd_skew_per_step"} for norm in NORMS),
    *({"norm": norm, "safeguard": "cone", "feedforward": "memory"} for norm in NORMS),
    *({"block": block} for block in BLOCKS),
    {"activation": "gelu_tanh", "bias": True, "feedforward_scale": True},
    {"head_bias": True, "tied": False, "beta": 0.7},
    {"block": "rgpt_parallel", "separate_norms": True, "attention_bias": True, "bias": True},
    {"block": "gpt", "activation": "relu"},
    {"terms": ("attention", "memory", "ff1")},
]


@pytest.fixture(scope="module")
def engine(context):
    return Engine(context)


def texts_for(vocabulary, count, length):
    return [torch.randint(vocabulary, (length,)).tolist() for _ in range(count)]


def small(**fields):
    return randomised(config(**fields)).float()


@pytest.mark.parametrize("name", zoo.names())
def test_models_of_the_zoo(engine, name):
    run = load_run(zoo.folder(name))
    agree(engine, run.model, texts_for(run.model.cfg.vocab_size, 20, 16))


@pytest.mark.parametrize("fields", PARTS, ids=str)
def test_every_part(engine, fields):
    agree(engine, small(**fields), texts_for(11, 2, 9))


@pytest.mark.parametrize("block", ["nrgpt", "rgpt"])
def test_more_steps_than_trained(engine, block):
    agree(engine, small(block=block, rate="free_per_step"), texts_for(11, 1, 9), steps=7)


@pytest.mark.parametrize("rate", ["gamma", "free_per_term"])
def test_an_energy_of_ones_own(engine, rate):
    direction = torch.randn(9).tolist()
    agree(engine, small(rate=rate), texts_for(11, 1, 9), (direction, 0.7))


@pytest.mark.parametrize("fields", [{"rate": "free_per_step"}, {"block": "rgpt"}], ids=str)
def test_the_sliders(engine, fields):
    model, texts = small(**fields), texts_for(11, 1, 9)
    seen = engine.watch(model, texts, rate=1.7, beta=0.4)[0]
    found = differences(seen, altered(model.double(), rate=1.7, beta=0.4), texts[0])
    assert max(found.values()) < 1e-5, found


def test_the_safeguard_can_be_turned_on(engine):
    model, texts = small(feedforward="memory"), texts_for(11, 1, 9)
    seen = engine.watch(model, texts, cone=True)[0]
    found = differences(seen, altered(model.double(), cone=True), texts[0])
    assert max(found.values()) < 1e-5, found
    assert max(max(p or 0 for p in states) for states in seen["push"]) > 0


def test_a_frozen_past(engine):
    """Each token rolls among the last states of the others."""
    model, texts = small(feedforward="memory", rate="gamma"), texts_for(11, 1, 9)
    seen = engine.watch(model, texts, frozen=True)[0]
    exact, idx = model.double(), torch.tensor(texts)
    start = exact.begin(idx)
    field = Field(exact, start, past=exact.last_state(idx))
    energies = [look.energy[0] for _, look in field.roll(start, 4)]
    assert torch.allclose(states_first(seen["energy"]), torch.stack(energies), rtol=1e-5)


def test_text_is_added_at_the_end_without_another_look_at_the_beginning(engine):
    grown, whole, kept = engine.run(
        """({ spec }) => {
          const model = new Model(spec), roll = new Roll(model).read([1, 2, 3, 4]).finish();
          const first = roll.rolled[2];
          roll.read([1, 2, 3, 5, 6]).finish();
          const again = new Roll(model).read([1, 2, 3, 5, 6]).finish();
          const energies = r => r.rolled.map(one => one.looks.map(look => look.energy));
          return [energies(roll), energies(again), roll.rolled[2] === first];
        }""",
        spec=describe(small()),
    )
    assert grown == whole
    assert kept


def test_attention_is_a_distribution_over_earlier_tokens(engine):
    p = engine.run(
        """({ spec }) => {
          const roll = new Roll(new Model(spec)).read([1, 2, 3, 4, 5]).finish();
          return roll.attention(3, 2).map(head => [...head]);
        }""",
        spec=describe(small()),
    )
    assert torch.tensor(p).shape == (3, 3)
    assert torch.tensor(p).sum(1).allclose(torch.ones(3))


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("past", ["moving", "settled"])
def test_the_landscape_of_a_token(engine, norm, past):
    """Energies at any points, and the minimum below the token's end."""
    fields = {"drive": True, "prelude": 1} if past == "settled" else {}
    model = small(norm=norm, past=past, feedforward="memory", rate="gamma", **fields)
    tokens = texts_for(11, 1, 9)[0]
    spec = describe(model)
    land = TokenLandscape(model.double(), torch.tensor([tokens]), token=6)
    points = land.random_points(5)
    told = {"spec": spec, "tokens": tokens, "points": points.tolist()}
    there = engine.run(
        """({ spec, tokens, points }) => {
          const land = new Landscape(new Roll(new Model(spec)).read(tokens).finish(), 6);
          const search = land.minimise(land.path().at(-1));
          let found = search.next();
          while (!found.done) found = search.next();
          const energies = points.map(u => land.look(Float64Array.from(u)).energy);
          return { path: land.path().map(u => [...u]), energies, below: found.value.energy };
        }""",
        **told,
    )
    assert torch.allclose(torch.tensor(there["energies"]).double(), land(points), rtol=1e-5)
    path = torch.tensor(there["path"]).double()
    assert torch.allclose(path, land.trajectory(), atol=1e-5)
    if norm != "none":  # without a norm this energy has no lowest point
        below = minimise(land, land.surface, path[-1:], iterations=5_000, reach=REACH)
        assert there["below"] == pytest.approx(below.energy.item(), rel=1e-5)


def test_both_roll_into_the_same_basin(engine):
    """Three minima are near this token's end; long steps would leap over the first."""
    run = load_run(zoo.folder("listops_settled"))
    tokens, spec = run.encode("max(4,median(1,5,3),2) ="), describe(run.model)
    land = TokenLandscape(run.model.double(), torch.tensor([tokens]), token=11)
    way = land.trajectory()[[-1, 0]]
    found = engine.run(
        """({ spec, tokens }) => {
          const land = new Landscape(new Roll(new Model(spec)).read(tokens).finish(), 11);
          return [land.path().at(-1), land.path()[0]].map(start => {
            const search = land.minimise(start);
            let found = search.next();
            while (!found.done) found = search.next();
            return found.value.energy;
          });
        }""",
        spec=spec,
        tokens=tokens,
    )
    below = minimise(land, land.surface, way, iterations=2_000, reach=REACH)
    assert found == pytest.approx(below.energy.tolist(), rel=1e-6)


RECORD = """({ spec, tokens, settings, A }) => {
  const roll = new Roll(new Model(spec), settings).read(tokens).finish();
  const at = t => roll.attention(A, t).map(p => [...p]);
  const attention = Array.from({ length: roll.steps + 1 }, (_, t) => at(t));
  return { ...record(roll), attention };
}"""


def near(there, here):
    """The same numbers, with None at the same places."""
    there, here = (torch.tensor([[torch.nan if v is None else v for v in row] for row in table],
                                dtype=torch.float64) for table in (there, here))  # fmt: skip
    scale = here.nan_to_num().abs().max().clamp(min=1)
    return torch.allclose(there, here, rtol=0, atol=1e-5 * float(scale), equal_nan=True)


@pytest.mark.parametrize(
    "fields",
    [
        *({"norm": norm, "feedforward": "memory", "safeguard": "cone"} for norm in NORMS),
        {"mask": "inclusive", "past": "settled", "prelude": 1, "feedforward": "memory"},
        {"rate": "free_per_step"},
        {"block": "gpt"},
        {"block": "rgpt_parallel"},
    ],
    ids=str,
)
def test_python_answers_what_the_page_computes(engine, fields):
    """Curves of everything, what it would say, and attention, for models of the local server."""
    model, tokens, A = small(**fields), texts_for(11, 1, 7)[0], 4
    settings = {"steps": None, "rate": 1, "beta": 1, "cone": None}
    told = {"spec": describe(model), "tokens": tokens, "settings": settings, "A": A}
    there = engine.run(RECORD, **told)
    answers = Answers(model.double(), SymbolTokenizer("abcdefghijk"))
    asked = {"tokens": tokens, "token": A, "settings": settings | {"word": "", "weight": 0}}
    here, looks = answers.roll(asked), answers.attention(asked)["heads"]
    assert there["curves"].keys() == here["curves"].keys()
    for name, table in here["curves"].items():
        assert near(there["curves"][name], table), name
    acts = "safeguard" in fields and fields["norm"] != "none"
    assert ("push" in here["curves"]) >= acts
    assert (there["said"], there["steps"]) == (here["said"], here["steps"])
    assert len(looks) == here["steps"] + (fields.get("block") != "gpt")
    for mine, theirs in zip(looks, there["attention"], strict=False):
        assert near(theirs, mine)


def test_weights_take_the_shortest_type_that_is_exact():
    for value, kind in ((0.5, "f16"), (1 + 2.0**-20, "f32"), (2.0**100, "bf16"), (0.1, "f64")):
        assert shortest(torch.tensor([value], dtype=torch.float64))[0] == kind
    assert shortest(torch.tensor([0.1]))[0] == "f32"


def test_what_the_engine_does_not_know_is_refused():
    class Own(FF1):
        pass

    model = small(feedforward="ff1")
    model.energy_block.terms["feedforward"].__class__ = Own
    with pytest.raises(
        NotForThePage, match=r"engine does not know the energy 'feedforward' \(Own\)"
    ):
        describe(model)
