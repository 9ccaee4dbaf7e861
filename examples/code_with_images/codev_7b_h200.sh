#!/usr/bin/env bash
# Eight H200 of one machine: codev_7b.yaml with h200.yaml. Variables and options are those of codev_7b.sh.
exec bash "$(dirname "$0")/codev_7b.sh" h200 "$@"
