-- In front of every script. KEYS[1] is the prefix of all keys of one model and carries its hash tag, so that
-- the keys built from it share a Cluster slot. ARGV[1] is the time in ms; 0, except in tests, takes the server's.
local KEEP_MS = 3600000 -- no key outlives its last use by much more than this
local RATE_WINDOW_MS = 10000

local now = tonumber(ARGV[1])
if now == 0 then
  local time = redis.call('TIME')
  now = time[1] * 1000 + time[2] / 1000
end

local function key(...)
  return KEYS[1] .. table.concat({...}, ':')
end

local RESERVED = key('reserved') -- zset: request, by the end of its reservation
local WAITING = key('waiting') -- zset: request, by deadline
local RETRY = key('retry') -- zset: those waiting that had a verifier already; served before all others
local CLASSES = key('classes') -- zset: class with tenants waiting, by priority
local DEPTH = key('depth') -- hash: waiting tokens; waiting requests of each class
local LEASES = key('leases') -- hash: request -> end, sequences, KV tokens, verifier
local OWNERS = key('owners') -- zset: gateway, by the end of its heartbeat
local ENDED = key('ended') -- zset: request, by the time until which a late extend of it is ignored
local RATE = key('rate') -- hash: grants, decayed, and when

local function int(number)
  return string.format('%.0f', number)
end

local function keep(name, ms)
  local wanted = KEEP_MS + (ms or 0)
  if redis.call('PTTL', name) < wanted - KEEP_MS / 2 then
    redis.call('PEXPIRE', name, int(wanted))
  end
end

local function load(id)
  local flat = redis.call('HGETALL', key('req', id))
  if #flat == 0 then
    return nil
  end
  local request = {}
  for i = 1, #flat, 2 do
    request[flat[i]] = flat[i + 1]
  end
  return request
end

local function touch_owner(owner, lease_ms)
  redis.call('ZADD', OWNERS, now + lease_ms, owner)
  keep(OWNERS, lease_ms)
end

local function owner_lives(owner)
  local ends = redis.call('ZSCORE', OWNERS, owner)
  return ends and tonumber(ends) > now
end

-- Epoch 0 and no verifier: the request left the queue without a grant.
local function tell_owner(owner, epoch, verifier, id, lease_ms)
  local list = key('grants', owner)
  redis.call('RPUSH', list, int(epoch) .. ' ' .. verifier .. ' ' .. id)
  redis.call('PEXPIRE', list, int(2 * lease_ms + 60000))
end

-- Fairness: an active tenant is one with requests waiting. Its service is the tokens charged so far.
local function enter(class, tenant)
  local service, active = key('service', class), key('active', class)
  if redis.call('ZSCORE', active, tenant) then
    return
  end
  local own = tonumber(redis.call('HGET', service, tenant) or '0')
  local floor = own
  local first = redis.call('ZRANGE', active, 0, 0, 'WITHSCORES')
  if #first > 0 then
    floor = tonumber(first[2])
  else
    local last = redis.call('GET', key('last', class))
    floor = last and tonumber(redis.call('HGET', service, last) or '0') or own
  end
  own = math.max(own, floor) -- time away earns no credit
  redis.call('HSET', service, tenant, int(own))
  redis.call('ZADD', active, int(own), tenant)
  keep(service)
  keep(active)
end

local function leave(class, tenant)
  redis.call('ZREM', key('active', class), tenant)
  redis.call('SET', key('last', class), tenant, 'PX', KEEP_MS)
  if redis.call('EXISTS', key('active', class)) == 0 then
    redis.call('ZREM', CLASSES, class)
  end
end

local function charge(class, tenant, tokens)
  local service, active = key('service', class), key('active', class)
  local sum = redis.call('HINCRBY', service, tenant, int(tokens))
  keep(service)
  if redis.call('ZSCORE', active, tenant) then
    redis.call('ZADD', active, sum, tenant)
  end
end

local function put_waiting(id, request)
  local left_ms = math.max(tonumber(request.deadline) - now, 0)
  redis.call('ZADD', WAITING, request.deadline, id)
  redis.call('HINCRBY', DEPTH, 'tokens', request.kv)
  redis.call('HINCRBY', DEPTH, 'class:' .. request.class, 1)
  keep(WAITING, left_ms)
  keep(DEPTH, left_ms)
  keep(key('req', id), left_ms)
  if request.retry == '1' then
    redis.call('ZADD', RETRY, request.deadline, id)
    keep(RETRY, left_ms)
    return
  end
  local queue = key('queue', request.class, request.tenant)
  redis.call('ZADD', queue, request.deadline, id)
  redis.call('ZADD', CLASSES, request.priority, request.class)
  keep(queue, left_ms)
  enter(request.class, request.tenant)
  keep(CLASSES, left_ms)
  keep(key('active', request.class), left_ms)
end

local function take_waiting(id, request)
  redis.call('ZREM', WAITING, id)
  if redis.call('EXISTS', WAITING) == 0 then
    redis.call('DEL', DEPTH)
  else
    redis.call('HINCRBY', DEPTH, 'tokens', '-' .. request.kv)
    redis.call('HINCRBY', DEPTH, 'class:' .. request.class, -1)
  end
  if redis.call('ZREM', RETRY, id) == 1 then
    return
  end
  local queue = key('queue', request.class, request.tenant)
  redis.call('ZREM', queue, id)
  if redis.call('EXISTS', queue) == 0 then
    leave(request.class, request.tenant)
  end
end

local function put_lease(id, request, lease_ms)
  redis.call('HSET', LEASES, id, table.concat(
    {int(now + lease_ms), request.seqs, request.kv, request.verifier}, ' '))
  keep(LEASES, lease_ms)
  keep(key('req', id), lease_ms)
end

local function parse_lease(text)
  local ends, seqs, kv, verifier = string.match(text, '^(%d+) (%d+) (%d+) (.*)$')
  return tonumber(ends), tonumber(seqs), tonumber(kv), verifier
end

-- Ends a waiting request without a grant; its owner learns of it.
local function drop_waiting(id, request, lease_ms)
  take_waiting(id, request)
  redis.call('DEL', key('req', id))
  tell_owner(request.owner, 0, '', id, lease_ms)
end

local function drop_expired(lease_ms)
  local ids = redis.call('ZRANGEBYSCORE', WAITING, '-inf', now)
  for _, id in ipairs(ids) do
    drop_waiting(id, load(id), lease_ms)
  end
  return #ids
end

local function drop_reservations()
  local ids = redis.call('ZRANGEBYSCORE', RESERVED, '-inf', now)
  for _, id in ipairs(ids) do
    redis.call('ZREM', RESERVED, id)
    redis.call('DEL', key('req', id))
  end
  return #ids
end

local function grants_per_s(added)
  local rate = redis.call('HMGET', RATE, 'grants', 'at')
  local grants = tonumber(rate[1] or '0') * math.exp(-(now - tonumber(rate[2] or now)) / RATE_WINDOW_MS)
  if added > 0 then
    grants = grants + added
    redis.call('HSET', RATE, 'grants', grants, 'at', now)
    redis.call('PEXPIRE', RATE, RATE_WINDOW_MS * 6)
  end
  return grants * 1000 / RATE_WINDOW_MS
end

local function held()
  return redis.call('ZCARD', RESERVED) + redis.call('ZCARD', WAITING)
end

local function full(reason)
  return {reason, held(), tostring(grants_per_s(0))}
end
