"""What the policy counts, in every service that asks it. Labels are names that an operator gave."""

from prometheus_client import Counter, Gauge

VERDICTS = Counter(
    "penstock_policy_verdicts_total",
    "Matches of the policy's rules, by what was done and where",
    ["rule", "action", "place"],
)
FILE_GOOD = Gauge(
    "penstock_policy_file_good",
    "1: the policy in use is the file as it is; 0: the file is bad, and the last good one goes on",
)
FILE_GOOD.set(1)
INFO = Gauge("penstock_policy_info", "1; the version in use", ["version"])
