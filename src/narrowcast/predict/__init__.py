"""Will it help my model on my cluster, and by how much? Measure a little, predict the rest."""

from narrowcast.predict.advice import Advice as Advice
from narrowcast.predict.advice import advise as advise
from narrowcast.predict.advice import advise_model as advise_model
from narrowcast.predict.cluster import Cluster as Cluster
from narrowcast.predict.cluster import load as load_cluster
from narrowcast.predict.cluster import presets as presets
from narrowcast.predict.model import Description as Description
from narrowcast.predict.model import Profile as Profile
from narrowcast.predict.probe import probe as measure_cluster
from narrowcast.predict.profile import profile as measure_model
from narrowcast.predict.source import resolve as find_model
from narrowcast.predict.step import Prediction as Prediction
from narrowcast.predict.step import Setup as Setup
from narrowcast.predict.sweep import Sweep as Sweep
from narrowcast.predict.zoo import MODELS as MODELS

__all__ = [
    "MODELS",
    "Advice",
    "Cluster",
    "Description",
    "Prediction",
    "Profile",
    "Setup",
    "Sweep",
    "advise",
    "advise_model",
    "find_model",
    "load_cluster",
    "measure_cluster",
    "measure_model",
    "presets",
]
