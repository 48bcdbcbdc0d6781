-- ARGV: now, id, owner, class, priority, tenant, sequences, kv tokens, wait ms, max tokens.
local id, owner, class, priority, tenant = ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[6]
local kv_tokens, wait = tonumber(ARGV[8]), tonumber(ARGV[9])
local state = redis.call('HGET', key('req', id), 'state')
if state and state ~= 'reserved' then return {'exists', 0} end
redis.call('ZREM', key('reserved'), id)
local tokens = waiting_tokens()
if tokens > 0 and tokens + kv_tokens > tonumber(ARGV[10]) then
  redis.call('DEL', key('req', id))
  return {'full', tokens}
end
local deadline = now + wait
redis.call('HSET', key('req', id), 'state', 'waiting', 'owner', owner, 'class', class, 'priority', priority,
  'tenant', tenant, 'sequences', ARGV[7], 'kv_tokens', kv_tokens, 'epoch', 0, 'avoid', '')
redis.call('PEXPIRE', key('req', id), wait + KEEP_MS)
line_up(id, class, priority, tenant, kv_tokens, deadline)
return {'ok', tokens}
