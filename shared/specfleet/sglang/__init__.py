"""Real SGLang servers: starting one, talking to one. Only cpu_speculation.py runs inside a server; the rest is torch-free."""

CPU_SPECULATION = "SPECFLEET_CPU_SPECULATION"
"""Environment variable that switches cpu_speculation.py on in a server."""

CPU_SPECULATION_RELEASE = "0.5.14"
"""The one release of SGLang that cpu_speculation.py is written for."""
