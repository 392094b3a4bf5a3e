import time, sys
from pathlib import Path
import ckpt, torch
from ckpt.job import use_topology
from ckpt.strategies.common import TorchCommonLoadStrategy
from ckpt.strategies.tensorstore import TensorStoreLoadShardedStrategy
from ckpt.strategies.zarr import ZarrLoadShardedStrategy
from tests.cuts import CUTS, chunks_of
from tests.golden.megatron.truth import truth
from tests.ranks import run_ranks
from tests.states import same_bits
GOLDEN = ("tp2", "dp2", "tp2-dp2", "zero-dim", "old-names")
def work(topology):
    out=[]
    t0=time.perf_counter(); n=0
    for name in GOLDEN:
        t=truth(name)
        for cut,(dims,fn) in {**CUTS,"as saved":(0,None)}.items():
            for S in (ZarrLoadShardedStrategy, TensorStoreLoadShardedStrategy):
                held={k:(fn or chunks_of(t.chunks[k]))(k,x,topology.rank,topology.world_size) for k,x in t.tensors.items() if x.dim()>=dims}
                if not held: continue
                n+=1
                try:
                    got=ckpt.load({k:[p.without_data() for p in v] for k,v in held.items()}, t.path, S(), TorchCommonLoadStrategy(allow_pickle=True,unknown="keep"))
                    for k,v in held.items():
                        g=got.get(k,[])
                        assert len(g)==len(v)
                        for a,b in zip(g,v): assert same_bits(a,b.data),(k,)
                except Exception as e:
                    out.append((name,cut,S.__name__,type(e).__name__,str(e)[:300]))
    return time.perf_counter()-t0, n, out
def w(topology):
    with use_topology(topology): return work(topology)
if __name__=="__main__":
    for n in map(int,sys.argv[1:]):
        t=time.perf_counter()
        r=run_ranks(n,w,timeout_s=300)
        print(n,"total",time.perf_counter()-t, [x[:2] for x in r])
        for o in r[0][2]: print(o)
