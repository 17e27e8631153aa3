"""Tensor parallelism: a model cut over ranks, each a process that has its part (decision 0075).

shard.py   what one rank has: of the model's sizes, of a tensor's rows and columns, of an adapter
peers.py   what ranks tell one another while they compute: torch.distributed
rank.py    a rank's process; board.py: plans, in memory that all ranks of a host read
team.py    the processes: told, heard, watched and ended; seating.py: started (members.py: what they
           are to the engine; begin.py: what they are told first; processes.py)
seats.py   ranks on several hosts: where each is; keeper.py: its parent there; links.py: how the
           engine reaches both, and who else does not (tls_socket.py)
meeting.py how ranks find one another
ranks.py   the runner that the engine drives: plans go to all ranks, tokens come from the first
kv.py      KV blocks, put together from what each rank has of them
"""
