"""What proves narrowcast: papers reproduced, predictions validated, studies of their size."""
