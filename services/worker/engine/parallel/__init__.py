"""Tensor parallelism: a model cut over ranks, each a process that has its part (decision 0075).

shard.py   what one rank has: of the model's sizes, of a tensor's rows and columns, of an adapter
peers.py   what ranks tell one another while they compute: torch.distributed
rank.py    a rank's process; board.py: plans, in memory that all ranks of a host read
team.py    the processes: started, told, heard, watched and ended
ranks.py   the runner that the engine drives: plans go to all ranks, tokens come from the first
kv.py      KV blocks, put together from what each rank has of them
"""
