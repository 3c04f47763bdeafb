"""Checks of the probe in float64 and at tiny size.

python experiments/descent/check.py
"""

import torch
from probe import Config, Model, cone, exact, norm, sdpa, to_sphere

SMALL = {
    "width": 32,
    "heads": 4,
    "context": 50,
    "vocabulary": 64,
    "steps": 3,
    "compile": False,
    "precision": "fp32",
}


def check_descent(**fields) -> None:
    """10,000 tokens, random weights, random updates of 1e-4 to 1e4 times x: no energy rises."""
    torch.manual_seed(0)
    c = Config(**{**SMALL, "cone": True, **fields})
    model = Model(c).double()
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.5)
    x = torch.randn(200, 50, 32, dtype=torch.float64) * 10 ** (
        torch.rand(200, 50, 1).double() * 6 - 3
    )
    with torch.no_grad():
        W = model.prepare()
        x = to_sphere(x) if c.sphere else x
        past = (
            None
            if not c.settled
            else model.split(torch.linalg.matmul(norm(torch.randn_like(x)), W["kv"].T))
        )
        g, q, _, kv = model.read(x, past, None, W)
        free = g.clone().requires_grad_()
        with torch.enable_grad():  # the force by autograd: another implementation
            z = free @ W["read"].T
            q = model.split(z[..., : model.queries])
            s = (
                model.scale
                * q
                @ (torch.nn.functional.pad(kv[..., :-1, :], (0, 0, 1, 0)) if c.strict else kv)[
                    ..., : q.shape[-1]
                ].mT
            )
            s = s.masked_fill(torch.ones(50, 50, dtype=torch.bool).triu(1), -torch.inf)
            E = -(W["alpha"][..., 0] / model.scale * s.logsumexp(-1)).sum(1)
            hidden = z[..., model.queries : model.queries + model.hidden]
            potential = (
                torch.nn.functional.softplus(hidden)
                if c.potential == "softplus"
                else hidden.relu() ** 2 / 2
            )
            E = E - (W["units"] * potential).sum(-1)
            if model.field is not None:
                E = E - free @ model.field
            f = -torch.autograd.grad(E.sum(), free)[0]
        E = E.detach()
        assert torch.allclose(E, model.energy(x, kv, None, W))
        size = x.norm(dim=-1, keepdim=True) * 10 ** (torch.rand(200, 50, 1).double() * 8 - 4)
        y = x + size * torch.randn_like(x) / 32**0.5
        new, push = cone(x, y, f, 0.0 if c.sphere else 32 * 1e-5, c.margin, c.nudge)
        new = to_sphere(new) if c.sphere else new
        rise = (model.energy(new, kv, None, W) - E) / E.abs().clamp_min(1e-3)
        assert new.isfinite().all()
        assert rise.max() <= 1e-12, rise.max()
        # the step's own force is the same: a step with these gains moves as the cone says
        out, _ = model.step(
            x,
            x,
            x,
            past,
            None,
            torch.zeros(5, 1).double(),
            W,
            model.block.W_P[0],
            model.block.W_2[0],
            attend=exact,
        )
        still, _ = cone(x, x, f, 0.0 if c.sphere else 32 * 1e-5, c.margin, c.nudge)
        assert torch.allclose(out, to_sphere(still) if c.sphere else still, rtol=1e-9, atol=1e-9), (
            fields
        )
    print(
        f"{fields}: cone acted on {(push > 0).double().mean():.2f}, largest rise {rise.max():.1e}"
    )


def check_edges() -> None:
    """Zero force, x along and against it, y = 0, y along it: finite, gradients too."""
    u = torch.randn(1, 6, 32, dtype=torch.float64)
    x = torch.stack(
        [
            torch.randn(32).double(),
            u[0, 1],
            -u[0, 2],
            u[0, 3] * 1e-4,
            torch.randn(32).double(),
            torch.zeros(32).double(),
        ]
    )[None]
    y = torch.stack(
        [x[0, 0], u[0, 1] * 3, u[0, 2], torch.zeros(32).double(), u[0, 4], torch.randn(32).double()]
    )[None]
    u[0, 0] = 0
    for slack in (0.0, 32e-5):
        for margin in (0.0, 0.05):
            leaves = [t.clone().requires_grad_() for t in (x, y, u)]
            new, _ = cone(*leaves, slack, margin, 1e-6)
            grads = torch.autograd.grad(new.square().sum(), leaves)
            assert all(t.isfinite().all() for t in (new, *grads)), (slack, margin)
    print("edges: finite")


def check_gradients(**fields) -> None:
    torch.manual_seed(0)
    c = Config(**{**SMALL, **fields})
    model = Model(c)
    tokens = torch.randint(64, (2, 50))
    *_, (x, _, _) = model.walk(tokens, c.steps)
    model.loss(x, tokens).mean().backward()
    missing = [
        n
        for n, p in model.named_parameters()
        if p.requires_grad and (p.grad is None or not p.grad.isfinite().all())
    ]
    model.eval()
    with torch.no_grad():
        *_, (x, _, _) = model.walk(tokens, c.steps)
        *_, (again, _, _) = model.walk(tokens, c.steps, attend=exact)
    assert torch.allclose(x, again, atol=1e-3), (x - again).abs().max()
    print(f"{fields}: gradients finite; without one: {missing}")


def check_settled_is_alone() -> None:
    """Of a settled model, a token's steps do not depend on the others' steps."""
    torch.manual_seed(0)
    c = Config(**SMALL, cone=True, settled=True, prelude=1)
    model = Model(c).double()
    with torch.no_grad():
        x, past, drive, W = model.begin(torch.randint(64, (2, 50)))
        zero, block = model.schedule(0, 1.0), model.block
        one, _ = model.step(x, x, x, past, drive, zero, W, block.W_P[0], block.W_2[0])
        other = x.clone()
        other[:, 10:] = torch.randn_like(other[:, 10:])
        other[:, :9] = torch.randn_like(other[:, :9])
        two, _ = model.step(other, other, other, past, drive, zero, W, block.W_P[0], block.W_2[0])
    assert torch.equal(one[:, 9], two[:, 9])
    print("settled: a token moves alone")


if __name__ == "__main__":
    q, kv = torch.randn(2, 3, 50, 8).double(), torch.randn(2, 3, 50, 16).double()
    for strict in (False, True):
        for keys in (False, True):
            assert torch.allclose(sdpa(q, kv, strict, keys, 0.3), exact(q, kv, strict, keys, 0.3))
    check_edges()
    for fields in (
        {"strict": True},
        {"settled": True},
        {"strict": True, "sphere": True},
        {"settled": True, "sphere": True},
        {"settled": True, "margin": 0.05},
        {"settled": True, "wide_query": True},
        {"strict": True, "field": True},
        {"settled": True, "potential": "softplus"},
        {"settled": True, "nudge": 0.0},
    ):
        check_descent(**fields)
    for fields in (
        {},
        {"strict": True},
        {"prelude": 2, "steps": 0},
        {"cone": True, "strict": True},
        {
            "cone": True,
            "settled": True,
            "prelude": 2,
            "loops": 2,
            "gains": "vector",
            "force_gain": True,
            "momentum": True,
        },
        {
            "cone": True,
            "settled": True,
            "prelude": 2,
            "share": True,
            "inject": "drive",
            "kv_gain": True,
            "writes": 3,
        },
        {
            "cone": True,
            "settled": True,
            "prelude": 1,
            "prelude_parallel": True,
            "inject": "state",
            "sphere": True,
            "wide_query": True,
            "noise": 0.1,
        },
        {
            "cone": True,
            "settled": True,
            "prelude": 2,
            "inject": "drive",
            "leak": 0.3,
            "start_norm": True,
            "gains": "vector",
        },
        {"cone": True, "strict": True, "embed_norm": True, "readout": True, "field": True},
    ):
        check_gradients(**fields)
    check_settled_is_alone()
