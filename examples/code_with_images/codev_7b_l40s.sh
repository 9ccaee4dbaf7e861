#!/usr/bin/env bash
# Eight L40S of one machine: codev_7b.yaml with l40s.yaml. Variables and options are those of codev_7b.sh.
exec bash "$(dirname "$0")/codev_7b.sh" l40s "$@"
