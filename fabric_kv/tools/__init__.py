"""Command lines.

>>> from fabric_kv.tools.plan import main
>>> main(["--model", "deepseek-r1", "--prefill-tp", "8", "--decode-tp", "8"])      # fabric-kv-plan
0
"""
