# SPDX-License-Identifier: MIT OR Apache-2.0
"""Speed of a model on this machine: what is timed is checked first, and stands beside its floor and other systems.

`protocol` says what is measured, `cases` which cases there are, `measuring` goes through them, `report` keeps what was
found as JSON, `peer_results` adds other systems, and `tables` and `chart` show it. The command is `metrale.cli.bench`.
"""
