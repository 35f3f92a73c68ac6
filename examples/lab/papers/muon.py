"""Rules for Muon's momentum under compression: ``python examples/lab/papers/muon.py RULE RATE STEPS [SYSTEM]``.

``plain`` is torch's step, ``nn`` has no Nesterov term. In the others a delivered entry's buffer takes the D steps since
its last delivery with the gradient over D: ``hold`` moves all entries by the orthogonalised buffer; ``masked`` moves
delivered entries by D times as much, and no others; ``maskednn`` likewise without the Nesterov term. ``mrule`` moves as
``masked`` does, with SGD's rule for the buffer.
"""

import sys
from pathlib import Path

import torch
from torch.optim import _muon

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from lab.papers import at_size

RULE, RATE, STEPS, *SYSTEM = sys.argv[1:]


class Muon(torch.optim.Muon):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            m = group["momentum"]
            for p in group["params"]:
                g, state = p.grad, self.state[p]
                if not state:
                    state.update(buffer=torch.zeros_like(g), waited=torch.ones_like(g), latest=torch.zeros_like(g))
                got, waited, buffer = g != 0, state["waited"], state["buffer"]
                if RULE in ("plain", "nn"):
                    buffer.lerp_(g, 1 - m)
                    update = buffer if RULE == "nn" else g.lerp(buffer, m)
                elif RULE == "mrule":
                    v = m * buffer + (1 - m) * g
                    state["latest"] = torch.where(got, v * (1 - m**waited) / (1 - m) / waited, state["latest"])
                    state["buffer"] = torch.where(got, m ** (waited - 1) * v, buffer)
                    update = state["latest"]
                else:
                    state["latest"] = torch.where(got, g / waited, state["latest"])
                    caught_up = m**waited * buffer + (1 - m**waited) * g / waited
                    state["buffer"] = buffer = torch.where(got, caught_up, buffer)
                    update = buffer if RULE == "maskednn" else state["latest"].lerp(buffer, m)
                step = _muon._zeropower_via_newtonschulz(
                    update, group["ns_coefficients"], group["ns_steps"], group["eps"]
                )
                step *= _muon._adjust_lr(group["lr"], group["adjust_lr_fn"], p.shape)
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_(torch.where(got, waited * step, 0) if RULE in ("masked", "maskednn", "mrule") else step)
                state["waited"] = torch.where(got, 1.0, waited + 1)


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.optim.Muon = Muon
    setup = at_size.setup("gpt", int(STEPS), 4, "Muon")
    print(at_size._train(setup, " ".join(SYSTEM) or "saving 50", float(RATE), 0, None)["held"])
