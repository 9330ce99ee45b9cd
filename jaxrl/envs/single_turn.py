"""One response, judged by functions of the user's alone."""

from jaxrl.envs.protocol import Env, StepOutput


class SingleTurnEnv(Env):
    """The reward is what `environment.reward_functions` give; this adds none and answers nothing.

    The functions read the other columns of the row as `extras`.
    """

    def step(self, action: str) -> StepOutput:
        """Ends the conversation."""
        self.turns += 1
        return StepOutput(observations=[], reward={}, done=True, metadata={})
