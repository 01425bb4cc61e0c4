"""Policies that change precision while a network trains, from what they see of its gradients."""

from narrowcast.parallel.policies.assignment import Assignment as Assignment
from narrowcast.parallel.policies.autoscale import AutoScale as AutoScale
from narrowcast.parallel.policies.diversity import GradientDiversity as GradientDiversity
from narrowcast.parallel.policies.watch import Watch as Watch
