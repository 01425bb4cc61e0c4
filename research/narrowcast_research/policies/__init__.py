"""Policies that change precision while a network trains, from what they see of its gradients."""

from narrowcast.parallel import Watch as Watch
from narrowcast_research.policies.assignment import Assignment as Assignment
from narrowcast_research.policies.autoscale import AutoScale as AutoScale
from narrowcast_research.policies.diversity import GradientDiversity as GradientDiversity
