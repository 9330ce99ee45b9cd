"""One response, judged by functions of the user's alone."""

from jaxrl.envs.protocol import Env, StepOutput


class SingleTurnEnv(Env):
    """Leaves the reward to `environment.reward_functions`; adds none and answers nothing.

    The functions read the other columns of the row as `extras`.
    """

    def step(self, action: str) -> StepOutput:
        """End the conversation after the first response; reward functions judge it."""
        self.turns += 1
        return StepOutput(observations=[], reward={}, done=True, metadata={})
