from .calls import (
    ChatCall as ChatCall,
)
from .chat.encoder import ChatEncoder as ChatEncoder
from .chat.messages import (
    check_text as check_text,
    drop_none as drop_none,
    normalize_messages as normalize_messages,
    render_chat as render_chat,
)
from .chat.probe import (
    check_template as check_template,
)
from .environments.environment import (
    Environment as Environment,
    Opening as Opening,
    Reply as Reply,
    RevisionEnvironment as RevisionEnvironment,
    Tool as Tool,
    ToolEnvironment as ToolEnvironment,
)
from .environments.episode import run_episode as run_episode
from .errors import (
    AgentFailedError as AgentFailedError,
    AgentsError as AgentsError,
    CallError as CallError,
    MessageError as MessageError,
    SamplerError as SamplerError,
)
from .graph import (
    MessageGraph as MessageGraph,
)
from .journal import (
    SessionJournal as SessionJournal,
    restore_session as restore_session,
)
from .launch import (
    AgentResult as AgentResult,
    AgentTask as AgentTask,
    agent_environment as agent_environment,
    run_command as run_command,
    run_function as run_function,
)
from .rows import (
    choose_trained as choose_trained,
    collect_tokens as collect_tokens,
)
from .sampler import (
    SampledTokens as SampledTokens,
    TokenSampler as TokenSampler,
)
from .server import AgentServer as AgentServer
from .server_sampler import ServerSampler as ServerSampler
from .session import (
    Session as Session,
    SessionBudget as SessionBudget,
    SessionReward as SessionReward,
)
