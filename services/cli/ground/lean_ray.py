"""What of Ray is not started: nobody uses it on one machine, and no setting leaves it out.

These are methods of Ray's inside, replaced before `ray.init`: where a newer Ray names them
otherwise, the start fails at once and says so.
"""

from typing import Any

# In place of each agent, as Ray's node manager ends when one does. What it adds, sh ignores.
_IDLE = ["/bin/sh", "-c", "exec tail -f /dev/null", "agent-left-out"]


def leave_out_what_serves_nobody() -> None:
    """Ray's head starts a dashboard, an autoscaler, a reader of logs, an agent for metrics and jobs
    and one that builds environments for workers (290 MB, 4 s of CPU), and waits for most of them.
    """
    from ray._private import node, services

    parts: Any = node.Node
    for start in ("start_monitor", "start_api_server", "start_log_monitor"):
        _replace(parts, start, lambda _self, **_options: None)
    start_raylet = parts.start_raylet

    def start_without_agents(self: Any, *arguments: Any, **options: Any) -> None:
        _say_that_no_agent_listens(self)
        start_raylet(self, *arguments, **options)

    _replace(parts, "start_raylet", start_without_agents)
    # Begins the command of the two agents, and of nothing else that is started.
    _replace(services, "_build_python_executable_command_memory_profileable", lambda *_: _IDLE)


def _replace(owner: Any, name: str, by: Any) -> None:
    """Raises RuntimeError where a newer Ray calls it otherwise."""
    if not hasattr(owner, name):
        import ray

        raise RuntimeError(
            f"Ray {ray.__version__} has no {owner.__name__}.{name}, which Penstock replaces: "
            "install the version of constraints.txt"
        )
    setattr(owner, name, by)


def _say_that_no_agent_listens(node: Any) -> None:
    """In the files that the agents would write their ports to, and the node manager waits for."""
    from ray import _raylet

    raylet: Any = _raylet
    for name in (
        raylet.DASHBOARD_AGENT_LISTEN_PORT_NAME,
        raylet.METRICS_AGENT_PORT_NAME,
        raylet.METRICS_EXPORT_PORT_NAME,
        raylet.RUNTIME_ENV_AGENT_PORT_NAME,
    ):
        raylet.persist_port(node.get_session_dir_path(), node.node_id, name, -1)
