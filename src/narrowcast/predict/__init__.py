"""Will it help my model on my cluster, and by how much? Measure a little, predict the rest.

Names are imported at their first use, so that `import narrowcast` stays free.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from narrowcast.lazy import homes_of, lazy_front

if TYPE_CHECKING:
    from narrowcast.predict import cluster, model, probe, profile
    from narrowcast.predict.advice import Advice as Advice
    from narrowcast.predict.advice import advise as advise
    from narrowcast.predict.advice import advise_model as advise_model
    from narrowcast.predict.cluster import Cluster as Cluster
    from narrowcast.predict.cluster import CodecSpeed as CodecSpeed
    from narrowcast.predict.cluster import Device as Device
    from narrowcast.predict.cluster import Level as Level
    from narrowcast.predict.cluster import presets as presets
    from narrowcast.predict.costs import Costs as Costs
    from narrowcast.predict.costs import volume as volume
    from narrowcast.predict.curves import measured_curve as measured_curve
    from narrowcast.predict.local import LocalPrediction as LocalPrediction
    from narrowcast.predict.local import LocalPredictor as LocalPredictor
    from narrowcast.predict.local_advice import LocalAdvice as LocalAdvice
    from narrowcast.predict.local_advice import advise_local as advise_local
    from narrowcast.predict.model import Description as Description
    from narrowcast.predict.model import Layer as Layer
    from narrowcast.predict.model import Profile as Profile
    from narrowcast.predict.model import TensorTime as TensorTime
    from narrowcast.predict.model import ddp_buckets as ddp_buckets
    from narrowcast.predict.model import read_profile as read_profile
    from narrowcast.predict.probe import local_device as local_device
    from narrowcast.predict.profile import ModelError as ModelError
    from narrowcast.predict.profile import ModelSource as ModelSource
    from narrowcast.predict.profile import Profiler as Profiler
    from narrowcast.predict.profile import check_numbers as check_numbers
    from narrowcast.predict.profile import default_loss as default_loss
    from narrowcast.predict.profile import example_batch as example_batch
    from narrowcast.predict.profile import mean_over_ranks as mean_over_ranks
    from narrowcast.predict.profile import profile_together as profile_together
    from narrowcast.predict.rounds import LocalSetup as LocalSetup
    from narrowcast.predict.sharded import Fsdp as Fsdp
    from narrowcast.predict.spreads import Spread as Spread
    from narrowcast.predict.spreads import Spreads as Spreads
    from narrowcast.predict.step import BANDWIDTHS as BANDWIDTHS
    from narrowcast.predict.step import Prediction as Prediction
    from narrowcast.predict.step import Setup as Setup
    from narrowcast.predict.step import StepPredictor as StepPredictor
    from narrowcast.predict.step import traffic as traffic
    from narrowcast.predict.sweep import Sweep as Sweep
    from narrowcast.predict.zoo import MODELS as MODELS

    dump_cluster = cluster.dump
    load_cluster = cluster.load
    parse_cluster = cluster.parse
    dump_profile = model.dump
    load_profile = model.load
    measure_cluster = probe.probe
    build_model = profile.build
    find_object = profile.find
    measure_model = profile.profile
    find_model = profile.resolve

HOMES = homes_of(
    {
        "advice": "Advice advise advise_model",
        "cluster": "Cluster CodecSpeed Device Level load_cluster:load parse_cluster:parse dump_cluster:dump presets",
        "costs": "Costs volume measured_curve",
        "local": "LocalPrediction LocalPredictor",
        "local_advice": "LocalAdvice advise_local",
        "model": "Description Layer Profile TensorTime ddp_buckets load_profile:load dump_profile:dump read_profile",
        "sharded": "Fsdp",
        "probe": "measure_cluster:probe local_device",
        "profile": "ModelError ModelSource Profiler build_model:build check_numbers default_loss example_batch"
        " find_object:find mean_over_ranks measure_model:profile profile_together find_model:resolve",
        "rounds": "LocalSetup",
        "spreads": "Spread Spreads",
        "step": "BANDWIDTHS Prediction Setup StepPredictor traffic",
        "sweep": "Sweep",
        "zoo": "MODELS",
    }
)
"""Every public name and the module that holds it."""

__getattr__, __dir__, __all__ = lazy_front(__name__, HOMES)
