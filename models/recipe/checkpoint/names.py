"""Writes into a state that began without it what `pointing.py` (NAMED) writes into a fresh model: the
head that begins answers compares names. Of its slow features the weakest make room:
`python -m models.recipe.checkpoint.names STATE OUT.pt`.
"""

import random
import sys
from pathlib import Path

import torch

from models.recipe import corpus
from models.recipe.batches import collate, row
from models.recipe.checkpoint.common import llama, tokenizer
from models.recipe.copying import HALF, Layout, times
from models.recipe.pointing import BEGINS, FAST
from models.recipe.tokenizer import ASSISTANT, PAD

SCORE = 5.0
m = llama(Path(sys.argv[1])).eval()
at = Layout.of(m.shape)
last = m.shape.layers - 1
corpus.LATER.update(
    recall=9, json=21, tools=23, short=3, about=1, talk=3, copying=0, story=0, passages=40
)
rows = [row(tokenizer, corpus.example(random.Random(f"names/{i}"), 0.9), 4096) for i in range(150)]
rows = [r for r in rows if len(r.ids) < 1400]
a = m.model.layers[last].self_attn
r = a.rows(BEGINS)
dim = m.shape.head_dim
half = dim // 2
slow = torch.tensor([p for pair in range(half - 2, FAST, -1) for p in (pair, pair + half)])
print(len(slow))
with torch.no_grad():
    Qs, Ks = [], []
    bs, ls = [], []
    codes = m.model.embed_tokens.weight[:, at.code]
    for one in rows:
        ids = torch.tensor([one.ids])
        x = m.model.layers[last].input_layernorm(m.seen(ids, last)[1].float())[0]
        places = [p for p, _ in one.guide.begins]
        if places:
            Qs.append(x[places])
        Ks.append(x[torch.randperm(len(x))[:150]])
        bs.append((codes[ids[0]][:-1, :HALF], x[1:, at.before][:, :HALF]))
        ls.append((codes[ids[0]][:-2, :HALF], x[2:, at.long_before]))
    X = torch.cat(Qs)
    Y = torch.cat(Ks)
    sb = times(torch.cat([p for p, _ in bs]), torch.cat([q for _, q in bs]))
    sl = times(torch.cat([p for p, _ in ls]), torch.cat([q for _, q in ls]))
    wq, bq, wk, bk = a.q_proj.weight[r], a.q_proj.bias[r], a.k_proj.weight[r], a.k_proj.bias[r]
    q0 = X @ wq.T + bq
    k0 = Y @ wk.T + bk
    full = q0 @ k0.T * dim**-0.5
    Q = q0[:, slow]
    K = k0[:, slow]
    Lq = torch.linalg.cholesky((Q.T @ Q / len(Q)).double() + 1e-6 * torch.eye(len(slow)).double())
    Kc = K - K.mean(0)
    Lk = torch.linalg.cholesky((Kc.T @ Kc / len(K)).double() + 1e-6 * torch.eye(len(slow)).double())
    U, S, V = torch.linalg.svd(Lq.T @ Lk)
    print("spread", [round(float(s) * dim**-0.5, 3) for s in S])
    keep = len(slow) - HALF
    Tq = S.sqrt()[:, None] * torch.linalg.solve(Lq.T, U).T  # rows: new dims of query
    Tk = S.sqrt()[:, None] * torch.linalg.solve(Lk.T, V.T).T
    print("check", float(((Q.double() @ Tq.T) @ (Kc.double() @ Tk.T).T - (Q @ Kc.T)).abs().max()))
    nq = (Tq @ wq[slow].double())[:keep].float()
    nbq = (Tq @ bq[slow].double())[:keep].float()
    nk = (Tk @ wk[slow].double())[:keep].float()
    nbk = (Tk @ bk[slow].double())[:keep].float()
    kept, free = slow[:keep], slow[keep:]
    wq[kept], bq[kept], wk[kept], bk[kept] = nq, nbq, nk, nbk
    size = float(codes[:, :HALF].square().sum(1).mean())
    much = (SCORE * dim**0.5 / size) ** 0.5
    wq[free] = 0
    bq[free] = 0
    wk[free] = 0
    bk[free] = 0
    eye = torch.eye(HALF) * much
    wq[free, at.long_before] = eye * sl
    wk[free, at.long_before] = eye * sl
    for i, f in enumerate(free.tolist()):
        wk[f, at.before.start + i] = much * sb
    a.q_proj.weight[r] = wq
    a.q_proj.bias[r] = bq
    a.k_proj.weight[r] = wk
    a.k_proj.bias[r] = bk
torch.save({"model": m.state_dict()}, sys.argv[2])
