#!/usr/bin/env bash
# A Ray cluster: rollout workers with a vLLM server each on one machine of eight GPUs, the learner on another: codev_7b.yaml with ray.yaml. Variables and options are those of codev_7b.sh.
exec bash "$(dirname "$0")/codev_7b.sh" ray "$@"
